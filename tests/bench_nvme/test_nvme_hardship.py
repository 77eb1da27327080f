"""`lamina nvme` where things go wrong: no room, no permission, no lockable memory, killed half-way."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_toys import NOBODY, TOY, lamina, lamina_as_nobody, leftovers, result_of, wait_until

from lamina.bench.nvme import main
from lamina.bench.nvme import session as session_module
from lamina.bench.nvme.args import parse
from lamina.bench.nvme.folder import FolderError, PrivateFolder
from lamina.bench.nvme.space import SpaceError, check_space

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives up root, so it needs to be root")
LONG = [*TOY, "--seconds", "60"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_what_does_not_fit_is_refused_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(SpaceError, match=r"33\.6 MB of files are wanted, .*--size \d+MiB would fit"):
        main([*TOY, "--size", "32MiB", str(small_disk)])
    assert leftovers(small_disk) == []


@pytest.mark.root
def test_a_disk_that_fills_up_meanwhile_is_an_error_and_nothing_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "check_space", lambda *arguments, **more: None)
    with pytest.raises(OSError, match="ENOSPC"):
        main([*TOY, "--size", "32MiB", str(small_disk)])
    assert leftovers(small_disk) == []


def test_more_than_is_free_is_refused(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(SpaceError, match=r"free, of which .* left alone"):
        check_space(tmp_path, free.f_blocks * free.f_frsize, in_memory=False)
    done = lamina("nvme", *TOY, "--size", "900TiB", str(tmp_path))
    assert (done.returncode, leftovers(tmp_path)) == (2, [])
    assert "--size" in done.stderr


def test_the_limit_of_a_files_size_is_told(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from lamina.bench.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "nvme", *TOY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "RLIMIT_FSIZE allows 1.05 MB" in done.stderr
    assert leftovers(tmp_path) == []


@needs_root
@pytest.mark.root
def test_without_permission_the_path_and_the_user_are_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        done = lamina_as_nobody("nvme", *TOY, folder)
        assert done.returncode == 2
        assert f"cannot work in {folder}: Permission denied; give a folder that user {NOBODY} may write" in done.stderr
        assert leftovers(Path(folder)) == []
        os.chmod(folder, 0o700)
        assert lamina_as_nobody("nvme", *TOY, folder).returncode == 2


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_little_lockable_memory_is_noted_and_measured_all_the_same(limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        before = f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))"
        result = result_of(lamina_as_nobody("nvme", *TOY, "--json", folder, before=before))
        (path,) = result["paths"]
        assert path["best"]["read"]["read"] > 0
        if any(trial["backend"] == "uring" for trial in path["trials"]) and limit == 0:
            assert any("RLIMIT_MEMLOCK is 0 bytes" in note for note in path["notes"])
        assert leftovers(Path(folder)) == []


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name, message in (("file", "is not a folder"), ("gone", "mkdir -p")):
        done = lamina("nvme", *TOY, str(tmp_path / name))
        assert done.returncode == 2
        assert message in done.stderr


def test_names_with_spaces_and_letters_of_all_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "Platte für Größen, nº 1"
    folder.mkdir()
    assert main([*TOY, "--workloads", "read", str(folder)]) == 0
    assert leftovers(folder) == []


@contextlib.contextmanager
def running(folder: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A long run that has begun to measure."""
    command = [sys.executable, "-m", "lamina.bench", "nvme", *LONG, *more, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: data_bytes(folder) >= 8 << 20 or process.poll() is not None)
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def data_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(".lamina-nvme-*/data-*.bin"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_half_way_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "mine").write_bytes(b"untouched")
    with running(tmp_path) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 128 + number
    assert "interrupted" in err
    assert "Traceback" not in err
    assert leftovers(tmp_path) == ["mine"]
    assert (tmp_path / "mine").read_bytes() == b"untouched"


def test_killed_half_way_the_next_run_cleans_up(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.kill()
        process.communicate(timeout=90)
    (left,) = leftovers(tmp_path)
    assert left.startswith(".lamina-nvme-")
    (tmp_path / "mine").write_bytes(b"untouched")
    result = result_of(lamina("nvme", *TOY, "--workloads", "read", "--json", str(tmp_path)))
    assert result["paths"][0]["notes"][0] == f"removed what a killed run left: {tmp_path / left}"
    assert leftovers(tmp_path) == ["mine"]


def workers_of(folder: Path) -> list[int]:
    """Processes that have a file of `folder` open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(str(folder) in os.readlink(fd) for fd in entry.iterdir()):
                found.append(int(entry.parent.name))
    return found


PROCESSES = """
import json, sys
from pathlib import Path
from lamina.bench.nvme.fleet import Fleet, Order
from lamina.bench.nvme.measure import Bench, FileSet, create_files
from lamina.bench.nvme.points import Point, Trial, Workload
files = FileSet(paths=(Path(sys.argv[1]),), file_bytes=1 << 20)
with Bench(files, buffer_bytes=1 << 20) as bench:
    create_files(files, bench.buffer.view, backend="threads", check=lambda: None)
with Fleet([Order(files=files, buffer_bytes=1 << 20)] * 2) as fleet:
    print(json.dumps([worker.pid for worker in fleet._workers]), flush=True)
    point = Point(backend="threads", block_bytes=1 << 16, queue_depth=2)
    while True:
        fleet.run([Trial(workload=Workload.READ, point=point, seconds=0.5)] * 2)
"""


def test_measuring_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESSES, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("[")
        wait_until(lambda: len(workers_of(tmp_path)) >= 2)
        process.kill()
    wait_until(lambda: not workers_of(tmp_path))


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("nvme", "doctor"):
        done = lamina(command, "")
        assert done.returncode == 2
        assert "the path is empty" in done.stderr
    assert leftovers(tmp_path) == []


def test_a_folder_named_twice_is_measured_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    paths = [str(tmp_path / "disk"), str(tmp_path / "link"), f"{tmp_path}/disk/", str(tmp_path)]
    assert parse(paths).paths == (tmp_path / "disk", tmp_path)


def test_a_disk_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    disks = [path for path in Path("/dev").iterdir() if path.is_block_device()]
    if not disks:
        pytest.skip("no block device here")
    with pytest.raises(FolderError, match=f"{disks[0]} is a disk, not a folder.*findmnt"):
        PrivateFolder(disks[0])


@pytest.mark.parametrize("option", ["--plot", "--save-as"])
def test_targets_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path, option: str) -> None:
    for target, message in ((tmp_path / "gone" / "x.png", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=f"{option} .*{message}"):
            main([*TOY, option, str(target), str(tmp_path)])
    assert leftovers(tmp_path) == []

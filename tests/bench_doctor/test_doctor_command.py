"""`lamina doctor`: what it tries, what it says when something is amiss, and the command it gives."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.aio_native import AsyncIO, BackendUnavailableError
from lamina.bench.doctor import io as doctor_io
from lamina.bench.doctor import machine as doctor_machine
from lamina.bench.doctor.command import main, render
from lamina.bench.doctor.finding import Finding, State, attempt, worst
from lamina.bench.doctor.path import check_path
from lamina.zero.adam.kernels import Kernels

RING_BAN = Path(__file__).parents[1] / "aio_native" / "ring_ban.py"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives up root, so it needs to be root")


def uring_works() -> bool:
    try:
        AsyncIO(backend="uring", queue_depth=2).close()
    except BackendUnavailableError:
        return False
    return True


def doctor(
    *arguments: str, launcher: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a run in another process."""
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "lamina.bench", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=100, check=False, env=env,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def named(result: dict[str, Any], name: str) -> dict[str, str]:
    """The one finding of this name, or the first."""
    found: dict[str, str] = next(finding for finding in result["findings"] if finding["name"] == name)
    return found


def one(findings: Iterator[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_all_that_is_tried_is_told_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.bench.doctor.path.IN_MEMORY", ())  # wherever temporary files are
    code = main([str(tmp_path)])
    out = capsys.readouterr().out
    assert code == 0, out
    for name in (
        "kernel", "io_uring", "threads", "liburing", "registered buffers", "huge pages", "checksum", "memory",
        "processor", "Adam kernels", "torch", "GPU", "ranks",
    ):  # fmt: skip
        assert name in out
    assert "1 MiB written and read back" in out
    assert f"mend: lamina nvme --save {tmp_path}" in out
    assert os.listdir(tmp_path) == []
    assert len(out.splitlines()) <= 45


def test_without_environment_and_by_full_path(tmp_path: Path) -> None:
    code, result = doctor(str(tmp_path), env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert (code, result["ok"]) == (0, True)
    assert named(result, "threads")["state"] == "ok"
    assert named(result, "Adam kernels")["state"] == "ok"


@pytest.mark.parametrize("number", ["EPERM", "ENOSYS"])
def test_where_io_uring_is_forbidden_threads_do_and_the_cause_is_named(tmp_path: Path, number: str) -> None:
    ban = (
        f"import errno; sys.path.insert(0, {str(RING_BAN.parent)!r}); import ring_ban; ring_ban.forbid(errno.{number})"
    )
    found = {one["name"]: one for one in in_child(f"doctor_io.check_backends(Path({str(tmp_path)!r}))", ban)}
    ring = found["io_uring"]
    assert ring["state"] == "warn"
    assert "seccomp" in ring["text"]
    assert "kernel.io_uring_disabled" in ring["text"]
    assert "seccomp" in ring["mend"] or "sysctl" in ring["mend"]
    assert found["threads"]["state"] == "ok"
    assert found["backend"]["text"].startswith('"auto" takes threads')


def test_a_config_that_insists_on_a_forbidden_ring_is_a_problem(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 1, "tiers": {"nvme": [str(tmp_path)], "io_backend": "uring"}}))
    code, result = doctor("--config", str(config), launcher=(str(RING_BAN), "EPERM"))
    forced = named(result, "tiers.io_backend")
    assert (code, result["ok"], forced["state"]) == (1, False, "fail")
    assert 'tiers.io_backend "auto"' in forced["mend"]


def test_without_torch_the_rest_is_still_told(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom lamina.bench.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", str(tmp_path)], capture_output=True, text=True, check=False
    )
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert (named(result, "torch")["state"], named(result, "torch")["mend"]) == ("fail", "pip install 'torch>=2.6'")
    assert named(result, "threads")["state"] == "ok"
    assert named(result, "memory")["state"] in ("ok", "warn")


CHILD = """
import ctypes, json, os, resource, sys
from pathlib import Path
from lamina.bench.doctor import io as doctor_io
from lamina.bench.doctor import path as doctor_path
libc = ctypes.CDLL(None)
{before}
found = list({check})
print(json.dumps([finding.as_dict() for finding in found]))
"""
DROP = f"os.setgroups([]); os.setresgid(*3 * [{NOBODY}]); os.setresuid(*3 * [{NOBODY}]); libc.prctl(4, 1, 0, 0, 0)"


def in_child(check: str, before: str) -> list[dict[str, str]]:
    """The findings of a check in a process that has changed itself first."""
    program = CHILD.format(before=before, check=check)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[dict[str, str]] = json.loads(done.stdout)
    return loaded


def test_without_huge_pages_the_setting_is_named() -> None:
    (found,) = in_child("doctor_io.check_pages()", "libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE")
    if found["state"] == "ok" and "hugetlb" in found["text"]:
        pytest.skip("pages were set aside here, which this cannot take away")
    assert found["state"] == "warn"
    assert found["mend"]


@needs_root
@pytest.mark.root
def test_little_lockable_memory_is_a_warning_with_the_command() -> None:
    if not uring_works():
        pytest.skip("only with io_uring")
    limit = "resource.setrlimit(resource.RLIMIT_MEMLOCK, 2 * (1 << 20,)); "
    (found,) = in_child("doctor_io.check_registration()", limit + DROP)
    assert (found["state"], found["name"]) == ("warn", "registered buffers")
    assert "RLIMIT_MEMLOCK 1.05 MB" in found["text"]
    assert "memlock" in found["mend"]


@needs_root
@pytest.mark.root
def test_memlock_0_leaves_threads_or_an_unregistered_ring() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        limit = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); "
        found = {one["name"]: one for one in in_child(f"doctor_io.check_backends(Path({folder!r}))", limit + DROP)}
        assert found["threads"]["state"] == "ok"
        assert "fail" not in {one["state"] for one in found.values()}
        if found["io_uring"]["state"] == "warn":
            assert "memlock" in found["io_uring"]["mend"] or "io_uring" in found["io_uring"]["mend"]
            assert found["backend"]["text"].startswith('"auto" takes threads')


@needs_root
@pytest.mark.root
def test_a_folder_that_may_not_be_written_names_user_and_command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (found,) = in_child(f"doctor_path.check_path(Path({folder!r}))", DROP)
        assert found["state"] == "fail"
        assert found["text"] == f"cannot be written by user {NOBODY}"
        assert found["mend"] == f"sudo install -d -m 700 -o {NOBODY} {folder}"
        (below,) = in_child(f"doctor_path.check_path(Path({folder!r}) / 'a b' / 'c')", DROP)
        assert f"cannot be made: {folder} cannot be written" in below["text"]
        assert below["mend"].endswith(f"'{folder}/a b/c'")


def test_paths_are_tried_by_writing(tmp_path: Path) -> None:
    folder = tmp_path / "Größen, nº 1"
    folder.mkdir()
    found = list(check_path(folder))
    assert "direct I/O works" in found[0].text or found[0].state is State.WARN
    assert found[1].text.endswith("free")
    assert os.listdir(folder) == []
    new = list(check_path(folder / "new"))
    assert "can be made" in new[0].text
    assert os.listdir(folder) == []
    (tmp_path / "file").write_bytes(b"keep")
    (bad,) = check_path(tmp_path / "file")
    assert (bad.state, bad.text) == (State.FAIL, "is not a folder: name another")
    assert (tmp_path / "file").read_bytes() == b"keep"


def test_a_folder_in_memory_is_a_warning() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = next(iter(check_path(Path(folder))))
        assert found.state is State.WARN
        assert "lives in memory (tmpfs)" in found.text
        assert os.listdir(folder) == []


def test_a_folder_where_no_file_can_be_made_is_a_problem() -> None:
    found = list(check_path(Path("/proc")))
    assert found[0].state is State.FAIL


def test_more_than_is_free_is_a_problem(tmp_path: Path) -> None:
    found = list(check_path(tmp_path, wanted_bytes=1 << 60))
    assert [
        finding.state for finding in found if "the config wants 1.15e+03 PB" in finding.text or "wants" in finding.text
    ] == [State.FAIL]


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_bytes_that_come_back_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "uring" and not uring_works():
        pytest.skip("io_uring cannot be used here")
    assert "works" in doctor_io.round_trip(backend, tmp_path)
    monkeypatch.setattr(AsyncIO, "read", lambda io, file, buffer: io.fsync(file))
    found = one(doctor_io.check_backends(tmp_path), "io_uring" if backend == "uring" else "threads")
    assert found.state is State.FAIL
    assert "other bytes came back" in found.text
    assert os.listdir(tmp_path) == []


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(doctor_machine.check_kernels()).state is State.OK
    monkeypatch.setattr(Kernels, "adam", lambda kernels, planes, hyper: None)
    found = next(doctor_machine.check_kernels())
    assert found.state is State.FAIL
    assert "Adam is WRONG on" in found.text


def test_a_checksum_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_io, "crc32c", lambda data: 0)
    assert one(doctor_io.check_limits(), "checksum").state is State.FAIL


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("garbage", None), (None, None)]
)
def test_the_quota_of_the_processor(tmp_path: Path, content: str | None, cores: float | None) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert doctor_machine.cpu_quota(tmp_path / "cpu.max") == cores


def failing(error: Exception) -> Iterator[Finding]:
    yield Finding(section="s", name="first", state=State.OK, text="fine")
    raise error


def test_a_check_that_fails_is_a_finding_and_a_bug_is_not_hidden() -> None:
    found = attempt("s", "check", lambda: failing(OSError(5, "broken")), mend="mend it")
    assert [finding.state for finding in found] == [State.OK, State.FAIL]
    assert (found[1].text, found[1].mend) == ("OSError: [Errno 5] broken", "mend it")
    assert worst(found) is State.FAIL
    with pytest.raises(ZeroDivisionError):
        attempt("s", "check", lambda: failing(ZeroDivisionError()))


def test_text_is_folded_and_commands_are_not() -> None:
    command = "sudo something " + "x" * 200
    findings = [
        Finding(section="one", name="a", state=State.WARN, text="word " * 60, mend=command),
        Finding(section="one", name="a", state=State.OK, text="second line of the same"),
        Finding(section="two", name="n" * 50, state=State.FAIL, text="text"),
    ]
    lines = list(render(findings, 60))
    assert any(line.endswith(command) for line in lines)
    assert all(len(line) <= 60 for line in lines if command not in line)
    assert [line for line in lines if not line.startswith(" ")] == ["one", "two", "", "1 problem, 1 warning"]
    assert list(render([], 80))[-1] == "all is well"

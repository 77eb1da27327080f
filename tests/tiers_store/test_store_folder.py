"""Locks, permissions, foreign files, paths that cannot be used, and disks that are too small."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import FROZEN, SHARDS, random_state, rank_folder, read_all, write_all

from lamina.tiers.errors import LockedError, SpaceError, StoreError
from lamina.tiers.nvme.lock import FolderLock
from lamina.tiers.nvme.room import disk_bytes
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.nvme.wear import written_by_device
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

Open = Callable[..., GenerationStore]

HOLD = """
    import sys, time, os
    from lamina.tiers.nvme.lock import FolderLock
    lock = FolderLock(sys.argv[1])
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def holder(folder: Path, *more: str) -> "subprocess.Popen[str]":
    """A process that holds the folder's lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(folder), *more],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(process.pid)
    return process


def end(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_job_is_refused_with_the_owner(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    with pytest.raises(
        LockedError, match=rf"in use by pid {os.getpid()} on host .*this process.*another name"
    ) as caught:
        open_store()
    assert (caught.value.pid, caught.value.host) == (os.getpid(), socket.gethostname())
    other = open_store(job="other")
    second = open_store(rank=1)
    write_all(other, random_state(), 0)
    write_all(second, random_state(), 0)
    other.close(remove=True)
    second.close(remove=True)
    assert read_all(store) == state
    assert os.listdir(tmp_path / "nvme") == ["job"]
    assert os.listdir(tmp_path / "nvme" / "job") == ["rank0"]


def test_another_process_holds_the_lock_until_it_dies(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(LockedError, match=f"pid {process.pid} on host {socket.gethostname()}") as caught:
            FolderLock(str(tmp_path))
        assert caught.value.pid == process.pid
    finally:
        end(process)
    lock = FolderLock(str(tmp_path))
    assert lock.takeover is not None
    assert f"stale lock of pid {process.pid}" in lock.takeover
    lock.release()
    again = FolderLock(str(tmp_path))
    assert again.takeover is None
    again.release(remove=True)
    assert os.listdir(tmp_path) == []


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    process = holder(tmp_path, "fork")
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while True:
            try:
                FolderLock(str(tmp_path)).release()
                break
            except LockedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        end(process)


def test_a_lock_that_cannot_be_written_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=r"cannot write the lock .*No space left on device"):
            FolderLock(str(tmp_path))
    FolderLock(str(tmp_path)).release()


def test_a_stale_lock_is_reported_by_the_store(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    write_all(store, random_state(), 4)
    store.close()
    (rank_folder(tmp_path) / "lock").write_text('{"pid": 999999999, "host": "elsewhere"}')
    (rank_folder(tmp_path) / "manifest.json.tmp").write_text("half a mani")
    again = open_store()
    text = again.report()
    assert "stale lock of pid 999999999 on host elsewhere" in text
    assert "manifest.json.tmp, a commit that was cut" in text
    assert "found generation 1, step 4" in text
    assert not (rank_folder(tmp_path) / "manifest.json.tmp").exists()


def test_files_are_private(open_store: Open, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store(shards=(*SHARDS, FROZEN))
        write_all(store, random_state((*SHARDS, FROZEN)), 0)
        store.pin(str(tmp_path / "ckpt"))
    finally:
        os.umask(old)
    for folder in (tmp_path / "nvme", rank_folder(tmp_path).parent, rank_folder(tmp_path), tmp_path / "ckpt"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [*rank_folder(tmp_path).iterdir(), *(tmp_path / "ckpt").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len(files) == 8


@pytest.mark.parametrize("name", ["job", "rank0", "lock", "manifest.json", "gen-0.bin", "manifest.json.tmp"])
def test_no_symbolic_link_is_followed(open_store: Open, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_bytes(b"precious" * 1000)
    if name not in ("job", "rank0"):
        store = open_store()
        write_all(store, random_state(), 0)
        store.close()
        (rank_folder(tmp_path) / name).unlink(missing_ok=True)
        (rank_folder(tmp_path) / name).symlink_to(victim)
    elif name == "job":
        (tmp_path / "nvme").mkdir()
        (tmp_path / "nvme" / "job").symlink_to(outside)
    else:
        (tmp_path / "nvme" / "job").mkdir(parents=True, mode=0o700)
        (tmp_path / "nvme" / "job" / "rank0").symlink_to(outside)
    with pytest.raises(StoreError, match=r"symbolic link|cannot open the lock"):
        open_store()
    assert victim.read_bytes() == b"precious" * 1000
    assert os.listdir(outside) == ["victim"]


def test_foreign_files_are_never_touched(open_store: Open, tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    folder.mkdir(parents=True, mode=0o700)
    foreign = ["gen-0.bin", "gen-1.bin", "gen-7.bin", "notes.txt", "frozen-1.bin", "gen-0.bin.bak"]
    for name in foreign:
        (folder / name).write_text(f"foreign {name}")
    (folder.parent / "other.txt").write_text("foreign")
    store = open_store(shards=(*SHARDS, FROZEN))
    state = random_state((*SHARDS, FROZEN))
    write_all(store, state, 0)
    store.close()
    store = open_store(shards=(*SHARDS, FROZEN))
    store.pin(str(tmp_path / "ckpt"))
    for step in range(1, 4):
        write_all(store, random_state(), step)
    store.restore(str(tmp_path / "ckpt"))
    assert read_all(store) == state
    store.close(remove=True)
    assert sorted(os.listdir(folder)) == sorted(foreign)
    for name in foreign:
        assert (folder / name).read_text() == f"foreign {name}"
    assert (folder.parent / "other.txt").read_text() == "foreign"


def test_closing_with_removal_leaves_nothing(open_store: Open, tmp_path: Path) -> None:
    store = open_store([NvmePath(path=str(tmp_path / "a" / "b c")), NvmePath(path=str(tmp_path / "d"))])
    write_all(store, random_state(), 0)
    store.close(remove=True)
    store.close(remove=True)
    assert os.listdir(tmp_path) == []
    with pytest.raises(StoreError, match="the store is closed"):
        store.begin()


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", ".hidden", "x" * 201, "a\0b"])
def test_a_job_name_that_is_no_file_name_is_refused(open_store: Open, tmp_path: Path, job: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        open_store(job=job)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "relative", "odd", "file", "below a file", "not writable"])
def test_paths_are_created_or_refused_with_key_path_and_user(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"relative": "state", "odd": str(tmp_path / "mit Leer ü 空"), "missing": str(tmp_path / "x" / "y")}.get(kind)
    if path:
        store = open_store([NvmePath(path=path)])
        monkeypatch.chdir("/")
        state = random_state()
        write_all(store, state, 0)
        assert read_all(store) == state
        return
    bad = tmp_path / "bad"
    if kind == "file":
        bad.write_text("x")
    elif kind == "below a file":
        bad.write_text("x")
        bad = bad / "under"
    else:
        if os.geteuid() == 0:
            bad = Path("/proc/no-such-place")
        else:
            bad.mkdir(mode=0o555)
    with pytest.raises(StoreError) as caught:
        open_store([NvmePath(path=str(tmp_path / "good")), NvmePath(path=str(bad))])
    for said in ("tiers.nvme[1].path", str(bad), "uid"):
        assert said in str(caught.value)


def test_no_path_at_all(open_store: Open, io: object) -> None:
    with pytest.raises(StoreError, match=r"tiers\.nvme is empty"):
        GenerationStore.open([], job="j", rank=0, shards=SHARDS, io=io)  # type: ignore[arg-type]


def test_the_same_directory_twice_is_refused(open_store: Open, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"tiers\.nvme\[1\]\.path .* is the same directory as tiers\.nvme\[0\]\.path"):
        open_store([NvmePath(path=str(tmp_path)), NvmePath(path=str(tmp_path / "x" / ".."))])


def test_thousands_of_shards_make_short_names(open_store: Open, tmp_path: Path) -> None:
    """A-06: the file names do not depend on the shards."""
    shards = tuple(
        ShardSpec(name=f"model.layers.{i}.mlp.experts.{i}.weight", numel=8 + i % 57, planes=SHARDS[0].planes)
        for i in range(3000)
    )
    root = tmp_path / ("p" * 150)
    store = open_store([NvmePath(path=str(root))], shards=shards)
    state = random_state(shards)
    write_all(store, state, 0)
    names = list(root.rglob("*"))
    assert max(len(path.name) for path in names) < 64
    assert max(len(str(path)) for path in names) < 4096
    store.close()
    assert read_all(open_store([NvmePath(path=str(root))], shards=shards)) == state


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(open_store: Open, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    numel = 2 * free.f_bavail * free.f_frsize
    huge = (ShardSpec(name="huge", numel=numel, planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2),)),)
    with pytest.raises(
        SpaceError, match=r"needs [\d,]+ bytes, but there is room for [\d,]+ .*nvme: [\d,]+ bytes"
    ) as caught:
        open_store(shards=huge, chunk_bytes=1 << 30)
    assert caught.value.wanted > 4 * numel
    assert not (tmp_path / "nvme").exists(), "what was created for the attempt is gone"


def test_a_budget_of_a_path_holds(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    need = store.bytes_on_disk
    store.close(remove=True)
    with pytest.raises(SpaceError) as caught:
        open_store([NvmePath(path=str(tmp_path / "nvme"), bytes=need - 1)])
    assert (caught.value.wanted, caught.value.free) == (need, need - 1)
    store = open_store([NvmePath(path=str(tmp_path / "nvme"), bytes=need)])
    write_all(store, random_state(), 0)
    store.pin(str(tmp_path / "ckpt"))
    write_all(store, random_state(), 1)
    assert need == disk_bytes(SHARDS, generations=2, chunk_bytes=4096)
    taken = sum(path.stat().st_blocks * 512 for path in rank_folder(tmp_path).glob("gen-*"))
    assert abs(taken - need) <= need * 0.05
    store.close(remove=True)
    both = [NvmePath(path=str(tmp_path / "a"), bytes=need // 4), NvmePath(path=str(tmp_path / "b"))]
    store = open_store(both)
    small = sum(path.stat().st_size for path in (tmp_path / "a").rglob("gen-*"))
    large = sum(path.stat().st_size for path in (tmp_path / "b").rglob("gen-*"))
    assert small <= need // 4
    assert small + large <= need * 1.2


def test_shares_follow_the_weights(open_store: Open, tmp_path: Path) -> None:
    shards = (ShardSpec(name="s", numel=1_000_000, planes=SHARDS[0].planes),)
    paths = [NvmePath(path=str(tmp_path / str(weight)), weight=weight) for weight in (1, 2, 5)]
    store = open_store(paths, shards=shards)
    state = random_state(shards)
    write_all(store, state, 0)
    written = [wear.written for wear in store.wear()]
    device = os.stat(tmp_path).st_dev
    assert written_by_device(store.wear()) == {f"{os.major(device)}:{os.minor(device)}": sum(written)}
    for path, share in zip(written, (1 / 8, 2 / 8, 5 / 8), strict=True):
        assert abs(path / sum(written) - share) < 0.01
    assert read_all(store) == state


def test_a_file_size_limit_is_named_and_nothing_is_left(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(SpaceError, match=r"RLIMIT_FSIZE.* at most 60,000 bytes: raise it") as caught:
            open_store()
        assert caught.value.wanted > caught.value.free == 60_000
        assert os.listdir(tmp_path) == []
        # The kernel's own refusal, after the manifest was written.
        monkeypatch.setattr("lamina.tiers.nvme.slot_pool.check_file_limit", lambda *_: None)
        with pytest.raises(SpaceError, match=r"EFBIG \(File too large\);.*RLIMIT_FSIZE is 60,000 bytes"):
            open_store()
        assert os.listdir(tmp_path) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_store_that_fails_late_is_gone_and_an_old_one_stays(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = Slot.create, []

    def fail_second(*arguments: Any) -> Slot:
        if made:
            assert (rank_folder(tmp_path) / "manifest.json").exists()
            raise KeyboardInterrupt
        made.append(create(*arguments))
        return made[-1]

    monkeypatch.setattr(Slot, "create", fail_second)
    with pytest.raises(KeyboardInterrupt):
        open_store()
    assert made
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(Slot, "create", create)
    state = random_state()
    with open_store(generations=1) as store:
        write_all(store, state, 0)
        store.close()
    monkeypatch.setattr(Slot, "create", fail_second)
    with pytest.raises(KeyboardInterrupt):
        open_store(generations=2)
    monkeypatch.setattr(Slot, "create", create)
    assert read_all(open_store(generations=2)) == state


def test_one_directory_named_twice_leaves_no_folders(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(StoreError, match="is the same directory as"):
        open_store([NvmePath(path=str(tmp_path / name)) for name in ("a", "b")])
    assert os.listdir(tmp_path / "a") == []
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not a directory"):
        open_store([NvmePath(path=str(tmp_path / name)) for name in ("a", "new/folder", "file")])
    assert os.listdir(tmp_path / "a") == []
    assert not (tmp_path / "new").exists()

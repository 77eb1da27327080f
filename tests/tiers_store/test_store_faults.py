"""Every call of an update fails once: the store is right afterwards, or says why not and keeps the last generation."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_io import FaultyIO
from store_samples import FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

import lamina.tiers.nvme.manifest as manifest_module
from lamina.aio_native import AsyncIO, AsyncIOError
from lamina.tiers.errors import IntegrityError, StorageFault, StoreError
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath

Open = Callable[..., GenerationStore]


def update(store: GenerationStore, old: State, step: int) -> State:
    """An update with pieces, reading back, carrying over and durability; the state that it makes."""
    new = dict(old)
    with store.begin() as transaction:
        for (shard, plane), data in random_state().items():
            if shard == "block2":
                continue
            third = len(data) // 3
            transaction.write(shard, plane, data[third:], offset=third)
            transaction.write(shard, plane, data[:third]).wait()
            buffer = bytearray(len(data))
            transaction.read(shard, plane, buffer).wait()
            assert buffer == data
            new[shard, plane] = data
        transaction.copy_rest()
        transaction.commit(step, durable=True)
    return new


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "refused", "delayed"])
@pytest.mark.parametrize("num_paths", [1, 2])
def test_every_transfer_of_an_update_fails_once(
    open_store: Open, io: AsyncIO, tmp_path: Path, kind: str, num_paths: int
) -> None:
    shim = FaultyIO(io)
    paths = [NvmePath(path=str(tmp_path / f"disk{index}")) for index in range(num_paths)]
    store = open_store(paths, io=shim)
    state = random_state()
    write_all(store, state, 0)
    step = number = 0
    outcomes = {"committed": 0, "kept": 0}
    while True:
        step += 1
        shim.arm(kind, number)
        number += 1 if number < 12 else 5
        failure: Exception | None = None
        try:
            state = update(store, state, step)
        except (StoreError, OSError) as error:
            failure = error
        shim.disarm()
        assert read_all(store) == state
        if failure is None:
            outcomes["committed"] += 1
            if not shim.hit:
                break
        else:
            outcomes["kept"] += 1
            assert shim.hit, failure
            assert kind != "delayed"
            assert shim.hit_path in str(failure) or shim.hit_path == getattr(failure, "path", None)
            # A write that another path can take over is no failure.
            assert not (num_paths == 2 and shim.hit == "write" and kind in ("eio", "enospc", "refused")), failure
        store.close()
        store = open_store(paths, io=shim)
        assert read_all(store) == state
        assert len(store._pool.slots) == 2
        state = update(store, state, step)
        assert read_all(store) == state
    assert outcomes["committed"] >= 1
    assert outcomes["kept"] >= 1 or kind == "delayed"


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_failed_path_is_left_out_and_told(open_store: Open, io: AsyncIO, tmp_path: Path, kind: str) -> None:
    shim = FaultyIO(io)
    paths = [NvmePath(path=str(tmp_path / f"disk{index}")) for index in range(3)]
    shards = (*SHARDS, FROZEN)
    store = open_store(paths, io=shim, shards=shards)
    state = random_state(shards)
    shim.arm(kind, 9, only="write")
    write_all(store, state, 0)
    assert shim.hit == "write"
    failed = next(path.path for path in paths if shim.hit_path.startswith(path.path))
    assert f"{failed} failed" in store.report()
    assert read_all(store) == state
    for step in range(1, 5):
        state |= random_state()
        write_all(store, state if step == 0 else {k: v for k, v in state.items() if k[0] != "embedding"}, step)
        assert read_all(store) == state
    generation = list(Path(failed).rglob("gen-*.bin"))
    assert generation == []
    store.close()
    store = open_store(paths, io=shim, shards=shards)
    assert read_all(store) == state
    store.close(remove=True)
    assert not any(path.exists() for path in (tmp_path / f"disk{index}" / "job" for index in range(3)))


def test_frozen_planes_move_off_a_failed_path_too(open_store: Open, io: AsyncIO, tmp_path: Path) -> None:
    shim = FaultyIO(io)
    paths = [NvmePath(path=str(tmp_path / f"disk{index}")) for index in range(2)]
    shards = (*SHARDS, FROZEN)
    for number in range(0, 16, 3):
        store = open_store(paths, io=shim, shards=shards, job=f"job{number}")
        state = random_state(shards)
        state = {key: state[key] for key in sorted(state, reverse=True)}  # the frozen planes first
        shim.arm("eio", number, only="write")
        write_all(store, state, 0)
        assert shim.hit
        store.close()
        assert read_all(open_store(paths, io=shim, shards=shards, job=f"job{number}")) == state


class NoRoom(FaultyIO):
    """An engine that cannot create files under one path."""

    def __init__(self, io: AsyncIO, path: str) -> None:
        super().__init__(io)
        self._path = path

    def open(self, path: str, **options: Any) -> Any:
        if path.startswith(self._path) and options.get("create"):
            raise AsyncIOError(errno.ENOSPC, f"cannot reserve for {path}: ENOSPC", path=path)
        return super().open(path, **options)


def test_files_are_made_where_they_can_be(open_store: Open, io: AsyncIO, tmp_path: Path) -> None:
    paths = [NvmePath(path=str(tmp_path / f"disk{index}")) for index in range(2)]
    shards = (*SHARDS, FROZEN)
    shim = NoRoom(io, paths[0].path)
    store = open_store(paths, io=shim, shards=shards)
    assert f"{paths[0].path} failed" in store.report()
    state = random_state(shards)
    write_all(store, state, 0)
    store.close()
    store = open_store(paths, io=shim, shards=shards)
    assert read_all(store) == state
    for step in range(1, 4):
        state |= random_state()
        write_all(store, {key: data for key, data in state.items() if key[0] != "embedding"}, step)
    assert read_all(store) == state
    store.close()
    with pytest.raises(AsyncIOError, match="ENOSPC"):
        open_store(paths[:1], io=shim, job="other")
    store = open_store(paths[:1], job="other")
    write_all(store, random_state(), 0)
    store.close(remove=True)
    assert os.listdir(paths[0].path) == ["job"]


def test_an_in_place_update_that_fails_says_what_is_lost(open_store: Open, io: AsyncIO) -> None:
    shim = FaultyIO(io)
    store = open_store(generations=1, io=shim)
    write_all(store, random_state(), 0)
    shim.arm("eio", 3, only="write")
    with pytest.raises(StorageFault, match=r"only generation .*is lost: .*load a checkpoint") as told:
        write_all(store, random_state(), 1)
    assert "intact" not in str(told.value)
    with pytest.raises(StoreError, match="in-place update was cut"):
        read_all(store)


def test_an_in_place_update_whose_commit_fails_says_what_is_lost(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(generations=1)
    state = random_state()
    write_all(store, state, 0)
    monkeypatch.setattr(manifest_module, "os", FaultyOS("rename", errno.ENOSPC))
    with pytest.raises(StorageFault, match=r"last committed generation is intact"):  # not begun: it cannot be announced
        write_all(store, random_state(), 1)
    monkeypatch.undo()
    assert read_all(store) == state
    with store.begin() as transaction:
        for (shard, plane), data in random_state().items():
            transaction.write(shard, plane, data)
        monkeypatch.setattr(manifest_module, "os", FaultyOS("rename", errno.ENOSPC))
        with pytest.raises(StorageFault, match=r"only generation .*is lost: .*load a checkpoint"):
            transaction.commit(1)
    monkeypatch.undo()


class FaultyOS:
    """os, with one call that fails."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._name:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[0].endswith(".tmp"):
                return real(*arguments, **options)
            if name == "write":
                real(arguments[0], bytes(arguments[1])[:100])
            raise OSError(self._number, os.strerror(self._number), "manifest.json.tmp")

        return call


@pytest.mark.parametrize("name", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_manifest_that_cannot_be_written_changes_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    for step in range(1, 4):
        with monkeypatch.context() as patch:
            patch.setattr(manifest_module, "os", FaultyOS(name, number))
            with pytest.raises(
                StorageFault, match=r"writing .*manifest\.json failed.*last committed generation is intact"
            ) as caught:
                write_all(store, random_state(), step)
        assert caught.value.errno == number
        assert read_all(store) == state
    store.close()
    store = open_store()
    assert read_all(store) == state
    state = random_state()
    write_all(store, state, 9)
    assert read_all(store) == state


def test_a_manifest_that_was_renamed_counts(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's fsync fails after the rename: what is on disk decides, in memory too."""
    store = open_store()
    write_all(store, random_state(), 0)
    state = random_state()

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "sync_directory", fail)
        write_all(store, state, 1)
    assert "making that durable failed" in store.report()
    assert read_all(store) == state
    store.close()
    assert read_all(open_store()) == state


LIMITED = """
    import errno, resource, signal, sys, warnings
    sys.path.insert(0, sys.argv[2])
    from lamina.aio_native import AsyncIO, AsyncIOError, BufferedIOWarning
    warnings.simplefilter("ignore", BufferedIOWarning)
    from lamina.tiers.errors import StoreError
    from lamina.tiers.nvme.store import GenerationStore
    from lamina.tiers.tier import NvmePath
    from store_samples import CHUNK, SHARDS, random_state, read_all, write_all
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with AsyncIO(queue_depth=4) as io:
        where = dict(paths=[NvmePath(path=sys.argv[1])], job="job", rank=0, shards=SHARDS, io=io, chunk_bytes=CHUNK)
        state = random_state()
        with GenerationStore.open(**where) as store:
            write_all(store, state, 0)
        for limit in (100, 1000, 4096, 50_000, 200_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                with GenerationStore.open(**where) as store:
                    fresh = random_state()
                    write_all(store, fresh, 1)
                    state = fresh
                    print("wrote under", limit)
            except (StoreError, OSError) as error:
                assert getattr(error, "errno", errno.EFBIG) in (errno.EFBIG, errno.EIO, errno.EINVAL), repr(error)
                print("refused under", limit)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            with GenerationStore.open(**where) as store:
                assert read_all(store) == state
    print("fine")
"""


def test_a_file_size_limit_loses_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE as the full disk that needs no privilege."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LIMITED), str(tmp_path), str(Path(__file__).parent)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "refused under 100" in done.stdout
    assert done.stdout.endswith("fine\n")


def mount_small(kind: str, mount: Path) -> None:
    """Mount a tmpfs, or an ext4 on a loop device, with room for little more than two generations."""
    commands = [["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(mount)]]
    if kind == "loop":
        image = mount.with_name("image")
        image.write_bytes(bytes(1 << 20))
        format_it = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-b", "4096", "-N", "64", "-m", "0", str(image)]
        commands = [format_it, ["mount", "-o", "loop", str(image), str(mount)]]
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"needs {command[0]}")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(command)} is not possible here: {done.stderr.strip()}")


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "loop"])
def test_a_full_file_system(open_store: Open, tmp_path: Path, kind: str) -> None:
    """A small disk that fills up between the opening and an update that needs new files."""
    mount = tmp_path / "small"
    mount.mkdir()
    mount_small(kind, mount)
    try:
        store = open_store([NvmePath(path=str(mount))])
        state = random_state()
        write_all(store, state, 0)
        store.pin(str(mount / "ckpt"))
        (mount / "ballast").write_bytes(b"x" * (os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize - 8192))
        new = random_state()
        write_all(store, new, 1)
        assert read_all(store) == new
        with pytest.raises(StoreError, match="removing an old checkpoint helps too"):
            write_all(store, random_state(), 2)
        assert read_all(store) == new
        (mount / "ballast").unlink()
        write_all(store, state, 3)
        assert read_all(store) == state
        store.close()
        store = open_store([NvmePath(path=str(mount))])
        assert read_all(store) == state
        store.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_read_that_fails_is_told_every_time(open_store: Open, io: AsyncIO) -> None:
    shim = FaultyIO(io)
    store = open_store(io=shim)
    state = random_state()
    write_all(store, state, 0)
    shard, plane = "block3", SHARDS[3].planes[0].plane
    shim.arm("eio", 0, only="read")
    handle = store.read(shard, plane, bytearray(40_022))
    for _ in range(3):
        with pytest.raises(OSError, match="EIO"):
            handle.wait()
    assert handle.done()
    assert read_all(store) == state


def test_verification_under_faults(open_store: Open, io: AsyncIO, tmp_path: Path) -> None:
    """A read error while a store is reopened is that error, not damage, and leaves no lock behind."""
    shim = FaultyIO(io)
    store = open_store(io=shim)
    state = random_state()
    write_all(store, state, 0)
    store.close()
    for number in range(6):
        shim.arm("eio", number, only="read")
        with pytest.raises(OSError, match="EIO") as caught:
            open_store(io=shim)
        assert not isinstance(caught.value, IntegrityError)
    shim.arm(None, -1)
    assert read_all(open_store(io=shim)) == state
    assert (rank_folder(tmp_path) / "manifest.json").exists()


def test_the_soft_limits_of_this_process_are_back() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert signal.getsignal(signal.SIGXFSZ) in (signal.SIG_IGN, signal.SIG_DFL)

"""Checkpoints by pinning: nothing copied, never written again, bit-exact after a restore."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ctrl_c import ctrl_c_soon
from store_samples import FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import IntegrityError, LayoutError, StorageFault, StoreError
from lamina.tiers.nvme.pin import unpin
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane, ShardSpec

Open = Callable[..., GenerationStore]
ALL = (*SHARDS, FROZEN)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than tmp_path."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def update(store: GenerationStore, step: int) -> State:
    """Train on: a fresh state for what is not frozen."""
    state = random_state()
    write_all(store, state, step)
    return state


def total_written(store: GenerationStore) -> int:
    return sum(wear.written for wear in store.wear())


@pytest.mark.parametrize(
    ("generations", "reopen", "striped"),
    [(1, False, True), (1, True, False), (2, False, False), (2, True, True), (3, True, False)],
)
def test_a_pin_survives_training_and_restores(
    tmp_path: Path, open_store: Open, generations: int, reopen: bool, striped: bool
) -> None:
    paths = [NvmePath(path=str(tmp_path / name)) for name in ("a", "b")[: 1 + striped]]
    store = open_store(paths, shards=ALL, generations=generations)
    state = random_state(ALL)
    write_all(store, state, 0, meta={"lr": 0.1})
    pinned_state = state | update(store, 1)
    before = total_written(store)
    pinned = store.pin(str(tmp_path / "ckpt" / "step1"))
    assert pinned.done()
    pinned.wait()
    assert total_written(store) == before
    assert (pinned.step, pinned.copy_bytes) == (1, 0)
    assert pinned.linked_bytes == sum(path.stat().st_size for path in (tmp_path / "ckpt/step1").glob("*.bin"))
    for step in range(2, 7):
        if reopen:
            store.close()
            store = open_store(paths, shards=ALL, generations=generations)
        update(store, step)
    with PinnedReader(str(tmp_path / "ckpt/step1"), store._pool.io) as reader:
        reader.sums(check=True)
        for (shard, plane), data in pinned_state.items():
            buffer = bytearray(len(data))
            reader.read(shard, plane, buffer).wait()
            assert buffer == data
    before = total_written(store)
    info = store.restore(str(tmp_path / "ckpt/step1"))
    assert total_written(store) == before
    assert (info.step, info.meta) == (1, {})
    assert read_all(store) == pinned_state
    for step in range(7, 11):
        latest = pinned_state | update(store, step)
        assert read_all(store) == latest
    assert len(store._pool.slots) == generations + 1
    assert store.restore(str(tmp_path / "ckpt/step1")).step == 1
    store.close()
    store = open_store(paths, shards=ALL, generations=generations)
    assert read_all(store) == pinned_state
    pinned.remove()
    assert not (tmp_path / "ckpt/step1").exists()
    assert read_all(store) == pinned_state


def test_a_pin_and_its_removal_let_files_be_reused(tmp_path: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    inodes = {path.stat().st_ino for path in rank_folder(tmp_path).glob("gen-*.bin")}
    pinned = store.pin(str(tmp_path / "ckpt"))
    pinned.remove()
    for step in range(1, 5):
        update(store, step)
    assert {path.stat().st_ino for path in rank_folder(tmp_path).glob("gen-*.bin")} == inodes
    kept = [store.pin(str(tmp_path / f"kept{step}")) for step in range(1)]
    for step in range(5, 9):
        update(store, step)
    now = {path.stat().st_ino for path in rank_folder(tmp_path).glob("gen-*.bin")}
    assert len(now - inodes) == 1
    assert len(kept) == 1


@pytest.mark.parametrize("direction", ["there and back", "into another store"])
def test_another_file_system_gets_a_checked_copy(
    tmp_path: Path, elsewhere: Path, open_store: Open, io: AsyncIO, direction: str
) -> None:
    paths = [NvmePath(path=str(tmp_path / "a"), weight=3), NvmePath(path=str(tmp_path / "b"))]
    store = open_store(paths, shards=ALL)
    state = random_state(ALL)
    write_all(store, state, 0, meta={"lr": 0.25})
    pinned = store.pin(str(elsewhere / "ckpt"))
    for step in range(1, 6):
        update(store, step)
    pinned.wait(60)
    assert pinned.linked_bytes == 0
    assert pinned.copied_bytes >= sum(map(len, state.values()))
    assert not [name for name in os.listdir(elsewhere / "ckpt") if name.endswith(".tmp")]
    target = store
    if direction == "into another store":
        store.close()
        target = open_store([NvmePath(path=str(tmp_path / "c"))], shards=ALL, chunk_bytes=8192)
    info = target.restore(str(elsewhere / "ckpt"))
    assert (info.step, info.meta) == (0, {"lr": 0.25})
    assert read_all(target) == state
    latest = state | update(target, 9)
    assert read_all(target) == latest


def test_a_damaged_pin_is_refused_and_changes_nothing(tmp_path: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    store.pin(str(tmp_path / "ckpt"))
    state = update(store, 1)
    state = update(store, 2)
    (path,) = (tmp_path / "ckpt").glob("gen-*.bin")
    with open(path, "r+b") as file:
        file.seek(40_000)
        byte = file.read(1)[0]
        file.seek(40_000)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(IntegrityError) as caught:
        store.restore(str(tmp_path / "ckpt"))
    assert caught.value.path == str(path)
    assert caught.value.offset <= 40_000 < caught.value.offset + 4096
    assert read_all(store) == state
    with pytest.raises(FileExistsError, match="a checkpoint is there already"):
        store.pin(str(tmp_path / "ckpt"))
    os.unlink(tmp_path / "ckpt" / "manifest.json")
    with pytest.raises(StoreError, match="holds no complete pinned generation"):
        store.restore(str(tmp_path / "ckpt"))


def test_a_pin_of_other_shards_is_refused(tmp_path: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    store.pin(str(tmp_path / "ckpt"))
    other = open_store(job="other", shards=(ShardSpec(name="x", numel=5, planes=SHARDS[0].planes),))
    with pytest.raises(LayoutError, match="'block0'"):
        other.restore(str(tmp_path / "ckpt"))


def test_a_pin_needs_something_committed(tmp_path: Path, open_store: Open) -> None:
    with pytest.raises(StoreError, match="nothing was committed yet"):
        open_store().pin(str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


def test_only_own_files_of_a_pin_are_removed(tmp_path: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "notes.txt").write_text("mine")
    pinned = store.pin(str(tmp_path / "ckpt"))
    pinned.remove()
    assert os.listdir(tmp_path / "ckpt") == ["notes.txt"]


def test_closing_waits_for_a_copy(tmp_path: Path, elsewhere: Path, open_store: Open) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    pinned = store.pin(str(elsewhere / "ckpt"))
    store.close(remove=True)
    assert pinned.done()
    pinned.wait()
    again = open_store()
    again.restore(str(elsewhere / "ckpt"))
    assert read_all(again) == state


def test_a_cut_in_place_update_restores_from_a_pin(tmp_path: Path, open_store: Open) -> None:
    store = open_store(generations=1)
    state = random_state()
    write_all(store, state, 3)
    store.pin(str(tmp_path / "ckpt"))
    update(store, 4)
    transaction = store.begin()
    transaction.write("block1", Plane.PARAM, bytes(10))
    store.close()
    store = open_store(generations=1, discard_torn=True)
    assert store.restore(str(tmp_path / "ckpt")).step == 3
    assert read_all(store) == state


def test_a_cut_pin_is_taken_up_again(tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and a temporary manifest without the final one: what a crash leaves."""
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    pinned = store.pin(str(tmp_path / "ckpt"))
    names = sorted(os.listdir(tmp_path / "ckpt"))
    (tmp_path / "ckpt" / "manifest.json").rename(tmp_path / "ckpt" / "manifest.json.tmp")
    (tmp_path / "ckpt" / "notes.txt").write_text("foreign")
    with pytest.raises(StoreError, match="holds no complete pinned generation"):
        PinnedReader(str(tmp_path / "ckpt"), store._pool.io)
    state = update(store, 1)
    store.pin(str(tmp_path / "ckpt"))
    assert sorted(os.listdir(tmp_path / "ckpt")) == sorted(["gen-1.bin", "manifest.json", "notes.txt"])
    assert len(names) == 2
    update(store, 2)
    assert store.restore(str(tmp_path / "ckpt")).step == 1
    assert read_all(store) == state
    unpin(str(tmp_path / "ckpt"))
    assert os.listdir(tmp_path / "ckpt") == ["notes.txt"]
    with pytest.raises(StoreError, match="holds no pinned generation"):
        unpin(str(tmp_path / "ckpt"))
    pinned.remove()


@pytest.mark.parametrize("number", range(4))
def test_a_removal_that_is_cut_can_be_taken_up(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Cut before its first, second ... deletion: no manifest counts, and the same directory can be pinned to."""
    store = open_store(shards=ALL)
    write_all(store, random_state(ALL), 0)
    pinned = store.pin(str(tmp_path / "ckpt"))
    real, count = os.unlink, 0

    def cut(path: str) -> None:
        nonlocal count
        count += 1
        if count > number:
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", cut)
        if number < 3:
            with pytest.raises(KeyboardInterrupt):
                pinned.remove()
        else:
            pinned.remove()
    assert not (tmp_path / "ckpt" / "manifest.json").exists()
    state = read_all(store)
    store.pin(str(tmp_path / "ckpt"))
    for step in range(1, 4):
        update(store, step)
    store.restore(str(tmp_path / "ckpt"))
    assert read_all(store) == state


def test_a_pin_that_fails_leaves_nothing(tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(OSError, match="No space left"):
            store.pin(str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()
    store.pin(str(tmp_path / "ckpt"))


def test_a_copy_that_finds_damage_says_so(tmp_path: Path, elsewhere: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    path = rank_folder(tmp_path) / "gen-0.bin"
    with open(path, "r+b") as file:
        file.seek(40_000)
        byte = file.read(1)[0]
        file.seek(40_000)
        file.write(bytes([byte ^ 4]))
    pinned = store.pin(str(elsewhere / "ckpt"))
    with pytest.raises(IntegrityError, match="the generation being pinned") as caught:
        pinned.wait()
    assert caught.value.path == str(path)
    assert caught.value.offset <= 40_000 < caught.value.offset + 4096
    assert not (elsewhere / "ckpt").exists()


def test_an_older_generation_can_be_had_back(tmp_path: Path, open_store: Open) -> None:
    store = open_store(generations=3)
    states = [random_state() for _ in range(4)]
    for step, state in enumerate(states):
        write_all(store, state, step)
    with store.begin() as transaction:
        transaction.write("block1", SHARDS[1].planes[0].plane, bytes(2000))
    path = Path(store._pool.slots[store._generations.committed[0].slot.stem].paths()[0])
    store.close()
    with open(path, "r+b") as file:
        file.write(b"damage")
    with pytest.raises(IntegrityError, match="open with at_step=2"):
        open_store(generations=3)
    with pytest.raises(StoreError, match=r"no generation of step 9 is kept; there is: \[3, 2, 1\]"):
        open_store(generations=3, at_step=9)
    with pytest.raises(IntegrityError):
        open_store(generations=3, at_step=1, verify="off")  # begun to be overwritten
    store = open_store(generations=3, at_step=2)
    assert read_all(store) == states[2]
    state = random_state()
    write_all(store, state, 3)
    store.close()
    assert read_all(open_store(generations=3)) == state


class SlowDisk:
    """An engine whose fsync is done when the test says so (or fails with `error`)."""

    def __init__(self, io: AsyncIO, error: OSError | None = None) -> None:
        self._io = io
        self.release = threading.Event()
        self.error = error
        self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

    def fsync(self, file: Any, **options: Any) -> Any:
        self.syncs += 1
        return SlowSync(self, self._io.fsync(file, **options))


class SlowSync:
    """A native handle that waits for its disk's release."""

    def __init__(self, disk: SlowDisk, real: Any) -> None:
        self._disk, self._real = disk, real

    @property
    def error(self) -> OSError | None:
        return self._disk.error

    def done(self) -> bool:
        return self._disk.release.is_set() and bool(self._real.done())

    def wait(self, timeout: float | None = None) -> int:
        if not self._disk.release.wait(timeout):
            raise TimeoutError
        if self._disk.error is not None:
            raise self._disk.error
        return int(self._real.wait(timeout))


def test_a_pin_in_the_background_lets_training_go_on(tmp_path: Path, open_store: Open, io: AsyncIO) -> None:
    disk = SlowDisk(io)
    store = open_store(io=disk, shards=ALL)
    state = random_state(ALL)
    write_all(store, state, 0)
    flushed = store.flush()
    pinned = store.pin(str(tmp_path / "ckpt"), background=True)
    assert not flushed.done()
    assert not pinned.done()
    with pytest.raises(TimeoutError):
        flushed.wait(0.01)
    with pytest.raises(TimeoutError, match="0 of 0 bytes copied"):
        pinned.wait(0.01)
    for step in range(1, 5):  # the disk has not yet answered, and the files' turn comes twice
        latest = state | update(store, step)
        assert read_all(store) == latest
    with pytest.raises(StoreError, match="holds no complete pinned generation"):
        PinnedReader(str(tmp_path / "ckpt"), io)
    disk.release.set()
    pinned.wait()
    flushed.wait()
    assert pinned.copy_bytes == 0
    assert pinned.linked_bytes > 0
    assert read_all(store) == latest
    assert store.restore(str(tmp_path / "ckpt")).step == 0
    assert read_all(store) == state


def test_ctrl_c_while_a_pin_is_waited_for_does_not_end_later_waits_early(
    tmp_path: Path, open_store: Open, io: AsyncIO
) -> None:
    disk = SlowDisk(io)
    store = open_store(io=disk)
    write_all(store, random_state(), 0)
    pinned = store.pin(str(tmp_path / "ckpt"), background=True)
    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        pinned.wait()
    assert not pinned.done()
    with pytest.raises(TimeoutError):
        pinned.wait(0.01)
    disk.release.set()
    pinned.wait()
    with PinnedReader(str(tmp_path / "ckpt"), io) as reader:
        assert reader.step == 0


def test_a_flushed_generation_need_not_be_waited_for_again(tmp_path: Path, open_store: Open, io: AsyncIO) -> None:
    disk = SlowDisk(io)
    disk.release.set()
    store = open_store(io=disk)
    write_all(store, random_state(), 0)
    store.flush().wait()
    assert disk.syncs == 1
    store.pin(str(tmp_path / "ckpt"))
    store.flush().wait()
    assert disk.syncs == 1
    update(store, 1)
    store.pin(str(tmp_path / "next"))
    assert disk.syncs == 2
    with pytest.raises(StoreError, match="nothing was committed"):
        open_store(job="other").flush()


def test_a_background_pin_that_the_disk_refuses_leaves_nothing(tmp_path: Path, open_store: Open, io: AsyncIO) -> None:
    disk = SlowDisk(io, OSError(5, "Input/output error"))
    store = open_store(io=disk)
    state = random_state()
    write_all(store, state, 0)
    disk.release.set()
    with pytest.raises(StorageFault, match="making a generation durable failed"):
        store.flush().wait()
    pinned = store.pin(str(tmp_path / "ckpt"), background=True)
    for _ in range(2):
        with pytest.raises(StorageFault, match="making a generation durable failed"):
            pinned.wait()
    assert not (tmp_path / "ckpt").exists()
    with pytest.raises(StorageFault):
        store.pin(str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()
    disk.error = None
    store.pin(str(tmp_path / "ckpt"))
    update(store, 1)
    store.restore(str(tmp_path / "ckpt"))
    assert read_all(store) == state


def test_whatever_goes_wrong_in_the_background_is_told(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("lamina.tiers.nvme.pin.publish_temporary", broken)
    store = open_store()
    write_all(store, random_state(), 0)
    pinned = store.pin(str(tmp_path / "ckpt"), background=True)
    with pytest.raises(KeyError, match="a mistake of ours"):
        pinned.wait()
    assert not (tmp_path / "ckpt").exists()


def test_an_open_update_in_place_keeps_its_files_from_being_pinned(tmp_path: Path, open_store: Open) -> None:
    store = open_store(generations=1)
    state = random_state()
    write_all(store, state, 0)
    with store.begin() as transaction:
        with pytest.raises(StoreError, match="would write the pinned files"):
            store.pin(str(tmp_path / "ckpt"))
        transaction.abort()
    store.pin(str(tmp_path / "ckpt"))
    update(store, 1)
    store.restore(str(tmp_path / "ckpt"))
    assert read_all(store) == state


def test_an_open_store_goes_back_to_what_is_whole_and_as_it_is_to_be(open_store: Open) -> None:
    store = open_store(generations=3)
    states = [random_state() for _ in range(3)]
    for step, state in enumerate(states):
        write_all(store, state, step)
    assert store.steps == (2, 1, 0)
    version = store.version
    store.go_back(1)
    assert (store.steps, store.version > version) == ((1, 0), True)
    assert read_all(store) == states[1]
    with pytest.raises(StoreError, match=r"no generation of step 2 is kept; there is: \[1, 0\]"):
        store.go_back(2)
    store.close()
    store = open_store(generations=3)
    assert store.steps == (2, 1, 0), "nothing was committed since"
    with store.begin() as transaction:
        with pytest.raises(StoreError, match="is open"):
            store.go_back(1)
        transaction.write("block1", SHARDS[1].planes[0].plane, bytes(2000)).wait()  # over the oldest one
    store.close()
    store = open_store(generations=3)
    with pytest.raises(IntegrityError):
        store.go_back(0)
    assert read_all(store) == states[2]
    store.leave_out((), {"block3": 5})
    with pytest.raises(StoreError, match="step 1, holds other shards"):
        store.go_back(1)
    store.leave_out(())
    store.go_back(1)
    write_all(store, states[0], 2)
    assert (store.steps[0], read_all(store)) == (2, states[0])

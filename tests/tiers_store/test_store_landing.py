"""A commit in the background: read as committed at once, waited for by what needs it, dropped whole when it fails."""

import ctypes
import errno
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from ctrl_c import ctrl_c_soon
from gated_io import GatedIO
from store_samples import FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

import lamina.tiers.nvme.manifest as manifest_module
from lamina.aio_native import AsyncIO, AsyncIOError
from lamina.tiers.errors import StorageFault, StoreError
from lamina.tiers.nvme.landing import Landing
from lamina.tiers.nvme.manifest import MANIFEST_NAME, read_manifest
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import Plane

Open = Callable[..., GenerationStore]
LAST = ("block3", Plane.EXP_AVG)
"""The plane that is still being written."""


def land(store: GenerationStore, gate: GatedIO, state: State, step: int) -> None:
    """Commit in the background while the second half of LAST stays under way."""
    transaction = store.begin()
    for (shard, plane), data in state.items():
        if (shard, plane) != LAST:
            transaction.write(shard, plane, data).wait()
    data = state[LAST]
    half = len(data) // 8192 * 4096
    transaction.write(*LAST, data[:half]).wait()
    gate.close()
    transaction.write(*LAST, data[half:], offset=half)
    transaction.commit(step, {"step": step}, background=True)


def step_on_disk(tmp_path: Path) -> int:
    manifest = read_manifest(str(rank_folder(tmp_path) / MANIFEST_NAME))
    assert manifest is not None
    return manifest.committed[0].step


@pytest.fixture
def gate(io: AsyncIO) -> GatedIO:
    return GatedIO(io)


def test_it_is_read_at_once_and_counts_when_it_has_landed(open_store: Open, gate: GatedIO, tmp_path: Path) -> None:
    store = open_store(io=gate, shards=(*SHARDS, FROZEN))
    old, new = random_state((*SHARDS, FROZEN)), random_state()
    write_all(store, old, 1)
    before = store.version
    land(store, gate, new, 2)
    assert store.version != before
    assert step_on_disk(tmp_path) == 1
    for (shard, plane), data in {**old, **new}.items():
        if (shard, plane) != LAST:
            buffer = bytearray(len(data))
            assert store.read(shard, plane, buffer).wait(10) == len(data)
            assert buffer == data
    data = new[LAST]
    first, whole = bytearray(4096), bytearray(len(data))
    store.read(*LAST, first).wait(10)  # of this half nothing is under way
    assert first == data[:4096]
    late = store.read(*LAST, whole)
    assert not late.done()
    with pytest.raises(TimeoutError):
        late.wait(0.01)
    found: list[object] = []
    waiting = [
        threading.Thread(target=lambda wait=wait: found.append(wait()))  # type: ignore[misc]
        for wait in (lambda: store.current, lambda: store.begin().abort(), lambda: store.flush().wait(), store.settle)
    ]
    waiting[0].start()
    waiting[0].join(0.05)
    assert waiting[0].is_alive()
    gate.open_gate()
    waiting[0].join()
    assert late.wait() == len(data)
    assert whole == data
    assert getattr(found[0], "step", None) == step_on_disk(tmp_path) == 2
    assert read_all(store) == {**old, **new}
    for thread in waiting[1:]:
        land(store, gate, new, 3)
        thread.start()
        thread.join(0.02)
        assert thread.is_alive()
        gate.open_gate()
        thread.join()
    assert store.current is not None
    assert (store.current.step, store.current.meta) == (3, {"step": 3})


@pytest.mark.parametrize("how", ["write", "manifest"])
def test_a_failure_refuses_every_use_until_it_is_taken(
    open_store: Open, gate: GatedIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = open_store(io=gate)
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    land(store, gate, new, 2)
    buffer = bytearray(len(new[LAST]))
    late = store.read(*LAST, buffer)
    full = AsyncIOError(errno.ENOSPC, "no space left on device", path="/x/gen")
    with monkeypatch.context() as patched:
        if how == "manifest":
            patched.setattr(manifest_module.os, "rename", lambda *_: (_ for _ in ()).throw(full))
            patched.setattr(manifest_module.os, "replace", lambda *_: (_ for _ in ()).throw(full))
        gate.open_gate(full if how == "write" else None)
        if how == "write":
            with pytest.raises(StorageFault, match="no space left"):
                late.wait()
        else:
            assert late.wait() == len(buffer)
        with pytest.raises(StorageFault, match="no space left"):
            store.settle()
    gate.open_gate()
    directory = str(tmp_path / "pin")
    for use in (
        lambda: read_all(store),
        lambda: store.current,
        store.begin,
        store.flush,
        lambda: store.pin(directory),
        lambda: store.leave_out(["block1"]),
        store.settle,
    ):
        with pytest.raises(StorageFault, match="no space left"):
            use()
    before = store.version
    assert isinstance(store.take_failure(wait=False), StorageFault)
    assert store.version != before
    assert store.take_failure(wait=True) is None
    assert store.current is not None
    assert (store.current.step, step_on_disk(tmp_path)) == (1, 1)
    assert read_all(store) == old
    write_all(store, new, 2, background=True)
    assert read_all(store) == new
    store.close()
    store = open_store(io=gate)
    assert read_all(store) == new


def test_closing_lets_it_land_and_tells_when_it_fails(open_store: Open, gate: GatedIO) -> None:
    store = open_store(io=gate)
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    land(store, gate, new, 2)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    gate.open_gate()
    closing.join()
    store = open_store(io=gate)
    assert read_all(store) == new
    land(store, gate, old, 3)
    gate.open_gate(AsyncIOError(errno.EIO, "input/output error", path="/x/gen"))
    with pytest.raises(StorageFault, match="input/output error"):
        store.close()
    gate.open_gate()
    store = open_store(io=gate)
    assert read_all(store) == new
    assert store.current is not None
    assert store.current.step == 2


def test_what_cannot_land_later_is_committed_at_once(open_store: Open) -> None:
    """An update in place; and with verify "always" a read waits for it."""
    store = open_store(generations=1)
    state = random_state()
    write_all(store, state, 1)
    with store.begin() as transaction:
        for (shard, plane), data in state.items():
            transaction.write(shard, plane, data)
        transaction.commit(2, background=True)
        assert transaction.state == "committed"
    store.close()
    store = open_store(verify="always")
    write_all(store, state, 3, background=True)
    assert read_all(store) == state
    with pytest.raises(StoreError, match="not written: block"), store.begin() as transaction:
        transaction.commit(4, background=True)
    assert store.current is not None
    assert store.current.step == 3


@pytest.mark.parametrize("cut_after_start", [False, True])
def test_ctrl_c_while_it_is_started_loses_nothing(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after_start: bool
) -> None:
    start, left = threading.Thread.start, [True]

    def cut(thread: threading.Thread) -> None:
        if thread.name == "lamina-commit" and left and left.pop():
            if cut_after_start:
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    store = open_store()
    state = random_state()
    monkeypatch.setattr(threading.Thread, "start", cut)
    with pytest.raises(KeyboardInterrupt):
        write_all(store, state, 1, background=True)
    store.settle()
    assert step_on_disk(tmp_path) == 1
    assert read_all(store) == state
    store.close()


def test_ctrl_c_while_it_is_waited_for_does_not_end_later_waits_early(
    open_store: Open, gate: GatedIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(io=gate)
    write_all(store, random_state(), 1)
    new = random_state()
    land(store, gate, new, 2)
    wait = Landing.wait

    def wait_and_open_the_gate(landing: Landing) -> bool:
        threading.Timer(0.02, gate.open_gate).start()
        return wait(landing)

    with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
        store.settle()
    with monkeypatch.context() as patched:
        patched.setattr(Landing, "wait", wait_and_open_the_gate)
        store.begin().abort()
    assert read_all(store) == new
    store.close()


def test_a_write_that_is_over_lets_go_of_its_bytes(open_store: Open, gate: GatedIO) -> None:
    """Whoever holds the handle: the bytes are room that a fetch waits for."""
    store = open_store(io=gate, shards=(*SHARDS, FROZEN))
    write_all(store, random_state((*SHARDS, FROZEN)), 1)
    (shard, plane), data = next(iter(random_state().items()))
    block = (ctypes.c_char * len(data)).from_buffer_copy(data)
    held = weakref.ref(block)
    transaction = store.begin()
    handle = transaction.write(shard, plane, memoryview(block).cast("B"))
    assert handle.wait(10) == len(data)
    del block
    assert held() is None
    transaction.abort()
    store.close()


def test_a_failure_that_is_taken_while_another_thread_is_told_of_it_is_told(open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 1)

    class TakenMeanwhile:
        @property
        def error(self) -> Exception:
            store._landing = None
            return StorageFault("no space left", errno=errno.ENOSPC, path="/x/gen")

    store._landing = TakenMeanwhile()  # type: ignore[assignment]
    with pytest.raises(StorageFault, match="no space left"):
        store.read(*LAST, bytearray(8))
    store.read(*LAST, bytearray(8)).wait(60)

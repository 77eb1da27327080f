"""Writes that are promised when a commit in the background begins: it waits for them, and so does who reads them."""

import errno
import threading
from collections.abc import Callable

import pytest
from gated_io import GatedIO
from store_samples import FROZEN, SHARDS, State, random_state, read_all, write_all

from lamina.aio_native import AsyncIO, AsyncIOError
from lamina.tiers.errors import StorageFault, StoreError
from lamina.tiers.nvme.landing import Promise
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.nvme.transaction import Transaction
from lamina.tiers.tier import Plane

Open = Callable[..., GenerationStore]
LATE = "block3"


def land_promising(store: GenerationStore, state: State, step: int) -> tuple[Transaction, Promise]:
    """Commit in the background; of LATE nothing is written yet."""
    transaction = store.begin()
    promise = transaction.promise(LATE)
    for (shard, plane), data in state.items():
        if shard != LATE:
            transaction.write(shard, plane, data)
    transaction.commit(step, background=True)
    return transaction, promise


def write_late(transaction: Transaction, state: State) -> None:
    for (shard, plane), data in state.items():
        if shard == LATE:
            transaction.write(shard, plane, data)


def read(store: GenerationStore, shard: str, plane: Plane, nbytes: int, **options: int) -> bytes:
    buffer = bytearray(nbytes)
    store.read(shard, plane, buffer, **options).wait(10)
    return bytes(buffer)


@pytest.mark.parametrize("piecewise", [False, True])
def test_reads_of_the_new_generation_wait_and_those_of_the_one_before_do_not(open_store: Open, piecewise: bool) -> None:
    store = open_store(shards=(*SHARDS, FROZEN))
    old, new = random_state((*SHARDS, FROZEN)), random_state()
    write_all(store, old, 1)
    before = store.version
    transaction, promise = land_promising(store, new, 2)
    late = {key: data for key, data in new.items() if key[0] == LATE}
    buffers = {key: bytearray(len(data)) for key, data in late.items()}
    waiting = {key: store.read(*key, buffer) for key, buffer in buffers.items()}
    for (shard, plane), data in new.items():
        assert read(store, shard, plane, len(data), version=before) == old[shard, plane]
        if shard != LATE:
            assert read(store, shard, plane, len(data)) == data
            assert read(store, shard, plane, len(data), version=before + 1) == data
    assert not any(handle.done() for handle in waiting.values())
    with pytest.raises(TimeoutError):
        waiting[LATE, Plane.PARAM].wait(0.01)
    settling = threading.Thread(target=store.settle)
    settling.start()
    for (shard, plane), data in late.items():
        cut = 4096 if piecewise else len(data)
        transaction.write(shard, plane, data[cut:], offset=cut)
        transaction.write(shard, plane, data[:cut]).wait()
    assert not any(handle.done() for handle in waiting.values()), "more may come"
    assert settling.is_alive()
    promise.keep()
    settling.join()
    for key, handle in waiting.items():
        handle.wait(10)
        assert buffers[key] == late[key]
    assert read_all(store) == {**old, **new}
    assert read(store, LATE, Plane.PARAM, 2, version=store.version) == new[LATE, Plane.PARAM][:2]
    with pytest.raises(StoreError, match="was replaced: the store is at"):
        store.read(LATE, Plane.PARAM, bytearray(2), version=before)
    store.close()
    assert read_all(open_store(shards=(*SHARDS, FROZEN))) == {**old, **new}


def test_a_broken_promise_drops_the_generation(open_store: Open) -> None:
    store = open_store()
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    transaction, promise = land_promising(store, new, 2)
    waiting = store.read(LATE, Plane.PARAM, bytearray(8))
    promise.fail(OSError(errno.EIO, "no gradient any more"))
    promise.keep()
    with pytest.raises(StoreError, match=f"{LATE} could not be written.*no gradient any more"):
        waiting.wait(10)
    with pytest.raises(StoreError, match="no gradient any more"):
        store.settle()
    with pytest.raises(StoreError, match="is aborted"):
        write_late(transaction, new)
    assert store.take_failure(wait=True) is not None
    assert read_all(store) == old
    transaction, promise = land_promising(store, new, 2)
    write_late(transaction, new)
    promise.keep()
    assert read_all(store) == new


def test_a_promise_that_is_kept_with_less_than_everything_is_told(open_store: Open) -> None:
    store = open_store()
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    transaction, promise = land_promising(store, new, 2)
    transaction.write(LATE, Plane.PARAM, new[LATE, Plane.PARAM])
    promise.keep()
    with pytest.raises(StoreError, match=f"not written: {LATE}/exp_avg"):
        store.settle()
    with pytest.raises(StoreError, match="is aborted"):
        write_late(transaction, new)
    store.take_failure(wait=True)
    assert read_all(store) == old


def test_a_failed_write_of_another_shard_ends_the_commit_but_not_the_promise(open_store: Open, io: AsyncIO) -> None:
    gate = GatedIO(io)
    store = open_store(io=gate)
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    gate.close()
    transaction, promise = land_promising(store, new, 2)
    waiting = store.read(LATE, Plane.PARAM, bytearray(8))
    gate.open_gate(AsyncIOError(errno.ENOSPC, "no space left on device", path="/x/gen"))
    with pytest.raises(StorageFault, match="no space left"):
        store.settle()
    gate.open_gate()
    with pytest.raises(StoreError, match="is aborted") as refused:
        write_late(transaction, new)
    promise.fail(refused.value)
    with pytest.raises(StoreError, match="is aborted"):
        waiting.wait(10)
    assert isinstance(store.take_failure(wait=True), StorageFault)
    assert read_all(store) == old


def test_closing_waits_for_what_is_promised(open_store: Open) -> None:
    store = open_store()
    old, new = random_state(), random_state()
    write_all(store, old, 1)
    transaction, promise = land_promising(store, new, 2)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    write_late(transaction, new)
    promise.keep()
    closing.join()
    assert read_all(open_store()) == new


def test_what_cannot_be_promised_is_refused(open_store: Open) -> None:
    store = open_store(shards=(*SHARDS, FROZEN))
    write_all(store, random_state((*SHARDS, FROZEN)), 1)
    with store.begin() as transaction:
        with pytest.raises(ValueError, match="frozen or written in place: its writes cannot be promised"):
            transaction.promise(FROZEN.name)
        promise = transaction.promise(LATE)
        write_late(transaction, new := random_state())
        transaction.copy_rest()
        with pytest.raises(StoreError, match=f"{LATE}: promised writes are for a commit in the background"):
            transaction.commit(2)
        promise.keep()
        transaction.commit(2, background=True)
    assert read(store, LATE, Plane.PARAM, 8) == new[LATE, Plane.PARAM][:8]
    store.close()
    store = open_store(generations=1, job="single")
    write_all(store, random_state(), 1)
    with store.begin() as transaction, pytest.raises(ValueError, match="in place"):
        transaction.promise(LATE)

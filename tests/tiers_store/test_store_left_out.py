"""Shards, whole or in part, that leave the store and come back while it is used: exact bytes, no space for what is elsewhere."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import CHUNK, FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import LayoutError, SpaceError, StoreError
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.nvme.transaction import Transaction
from lamina.tiers.tier import NvmePath, Plane

Open = Callable[..., GenerationStore]
BIG = "block3"


def update_some(store: GenerationStore, state: State, names: set[str], step: int) -> State:
    """Fresh bytes for these shards, the rest carried over."""
    new = {key: os.urandom(len(data)) for key, data in state.items() if key[0] in names}
    with store.begin() as transaction:
        for (shard, plane), data in new.items():
            transaction.write(shard, plane, data)
        transaction.copy_rest()
        transaction.commit(step)
    return state | new


@pytest.mark.parametrize("generations", [1, 2, 3])
@pytest.mark.parametrize("striped", [False, True])
def test_a_shard_leaves_and_comes_back(tmp_path: Path, open_store: Open, generations: int, striped: bool) -> None:
    paths = [NvmePath(path=str(tmp_path / name)) for name in ("a", "b")[: 1 + striped]]
    store = open_store(paths, generations=generations, verify="always")
    state = random_state()
    write_all(store, state, 0)
    full = store.bytes_on_disk
    store.leave_out({BIG})
    assert read_all(store) == {key: data for key, data in state.items() if key[0] != BIG}
    for step in range(1, 4):
        state = update_some(store, state, {"block1"}, step)
        left = {key: data for key, data in state.items() if key[0] != BIG}
        assert read_all(store) == left
    assert store.bytes_on_disk < full - 20_011 * 6 * generations
    store.leave_out(())
    state = update_some(store, state, {BIG}, 4)
    for step in range(5, 9):
        state = update_some(store, state, {"block2"}, step)
        assert read_all(store) == state
    assert store.bytes_on_disk == full


def test_what_comes_back_must_be_written(open_store: Open) -> None:
    store = open_store(left_out=[BIG])
    state = {key: data for key, data in random_state().items() if key[0] != BIG}
    write_all(store, state, 0)
    with pytest.raises(KeyError, match="block3"):
        store.read(BIG, Plane.PARAM, bytearray(2))
    store.leave_out(())
    with store.begin() as transaction:
        assert f"{BIG}/param" in transaction.missing()
        with pytest.raises(StoreError, match=r"does not hold block3/param: write it"):
            transaction.copy_rest()
    assert store.current is not None
    assert store.current.step == 0


def test_a_store_reopens_with_what_its_generation_holds(open_store: Open) -> None:
    store = open_store(left_out=[BIG])
    state = {key: data for key, data in random_state().items() if key[0] != BIG}
    write_all(store, state, 7)
    store.close()
    store = open_store(left_out=[BIG])
    assert store.current is not None
    assert store.current.step == 7
    assert read_all(store) == state


def test_a_pin_holds_what_was_there_and_nothing_of_what_was_not(tmp_path: Path, open_store: Open, io: AsyncIO) -> None:
    shards = (*SHARDS, FROZEN)
    store = open_store(shards=shards, left_out=[BIG])
    state = {key: data for key, data in random_state(shards).items() if key[0] != BIG}
    write_all(store, state, 1)
    store.pin(str(tmp_path / "pin")).wait()
    with PinnedReader(str(tmp_path / "pin"), io) as pinned:
        assert [shard.name for shard in pinned.shards] == [shard.name for shard in shards if shard.name != BIG]
        pinned.sums(check=True)
    update_some(store, state, {"block1"}, 2)
    store.restore(str(tmp_path / "pin"))
    assert read_all(store) == state
    state = update_some(store, state, {"block1"}, 2)
    # A store that never had the shard can take the checkpoint, too.
    other = open_store([NvmePath(path=str(tmp_path / "other"))], shards=[s for s in shards if s.name != BIG])
    other.restore(str(tmp_path / "pin"))
    assert other.current is not None
    assert other.current.step == 1


def test_without_room_nothing_changes(tmp_path: Path, open_store: Open) -> None:
    store = open_store([NvmePath(path=str(tmp_path / "nvme"), bytes=120_000)], left_out=[BIG])
    state = {key: data for key, data in random_state().items() if key[0] != BIG}
    write_all(store, state, 0)
    before = sorted(os.listdir(rank_folder(tmp_path)))
    with pytest.raises(SpaceError):
        store.leave_out(())
    assert sorted(os.listdir(rank_folder(tmp_path))) == before
    state = update_some(store, state, {"block1"}, 1)
    assert read_all(store) == state


def test_wrong_names_and_open_transactions_are_refused(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(KeyError, match="block9"):
        store.leave_out({"block9"})
    with store.begin(), pytest.raises(StoreError, match="is open"):
        store.leave_out({BIG})


# -- fronts --------------------------------------------------------------------------------------------------------------


def behind(store: GenerationStore, front: int) -> State:
    """What the store has, the shard with a front from there on; offsets are those of the whole planes."""
    state = {}
    for shard in store.shards:
        for spec in shard.planes:
            buffer = bytearray(shard.numel * spec.itemsize)
            offset = front * spec.itemsize if shard.name == BIG else 0
            store.read(shard.name, spec.plane, buffer, offset=offset).wait()
            state[shard.name, spec.plane] = bytes(buffer)
    return state


def without_front(state: State, front: int) -> State:
    itemsizes = {spec.plane: spec.itemsize for spec in SHARDS[0].planes}
    return {key: data[front * itemsizes[key[1]] :] if key[0] == BIG else data for key, data in state.items()}


def write_between(transaction: Transaction, state: State, first: int, last: int) -> None:
    """Those elements of the shard."""
    for spec in SHARDS[0].planes:
        data = state[BIG, spec.plane][first * spec.itemsize : last * spec.itemsize]
        transaction.write(BIG, spec.plane, data, offset=first * spec.itemsize)


@pytest.mark.parametrize("generations", [1, 2, 3])
@pytest.mark.parametrize("striped", [False, True])
def test_a_front_leaves_grows_shrinks_and_comes_back(
    tmp_path: Path, open_store: Open, generations: int, striped: bool
) -> None:
    paths = [NvmePath(path=str(tmp_path / name)) for name in ("a", "b")[: 1 + striped]]
    store = open_store(paths, generations=generations, verify="always")
    state = random_state()
    write_all(store, state, 0)
    full, before, sizes = store.bytes_on_disk, 0, {}
    for step, front in enumerate((5_000, 12_345, 12_345, 20_010, 7, 0, 3, 0), 1):
        store.leave_out((), {BIG: front} if front else {})
        with store.begin() as transaction:
            if front < before:
                with pytest.raises(StoreError, match="does not hold block3/param: write it"):
                    transaction.copy_rest()
                write_between(transaction, state, front, before)
            transaction.copy_rest()
            transaction.commit(step)
        assert behind(store, front) == without_front(state, front)
        if front:
            with pytest.raises(ValueError, match="which are elsewhere"):
                store.read(BIG, Plane.PARAM, bytearray(2), offset=2 * front - 2)
        for again in range(generations):  # the files of all generations follow
            state = update_some(store, state, {"block1"}, 10 * step + again)
        assert behind(store, front) == without_front(state, front)
        before, sizes[front] = front, store.bytes_on_disk
    assert sizes[0] == full > sizes[5_000] > sizes[12_345] > sizes[20_010]


@pytest.mark.parametrize("background", [False, True])
def test_a_landing_generation_with_another_front_is_read_as_a_whole(open_store: Open, background: bool) -> None:
    store = open_store(fronts={BIG: 6_000})
    state = random_state()
    with store.begin() as transaction:
        for key, data in without_front(state, 6_000).items():
            transaction.write(*key, data, offset=transaction.begin_of(*key))
        transaction.commit(0)
    store.leave_out(())
    with store.begin() as transaction:
        write_between(transaction, state, 0, 6_000)
        back = bytearray(200)
        transaction.read(BIG, Plane.PARAM, back, offset=100).wait()
        assert back == state[BIG, Plane.PARAM][100:300]
        transaction.copy_rest()
        transaction.commit(1, background=background)
    assert read_all(store) == state


@pytest.mark.parametrize("link", [True, False])
def test_a_pin_holds_what_is_behind_a_front_and_restores_it(tmp_path: Path, open_store: Open, link: bool) -> None:
    store = open_store(fronts={BIG: 6_001})
    state = random_state()
    with store.begin() as transaction:
        for key, data in without_front(state, 6_001).items():
            transaction.write(*key, data, offset=transaction.begin_of(*key))
        transaction.commit(3)
    store.pin(str(tmp_path / "pin")).wait()
    left = {shard.name: shard.numel for shard in store.shards}
    assert left[BIG] == 20_011 - 6_001
    update_some(store, without_front(state, 6_001), {"block1"}, 4)
    if link:
        store.restore(str(tmp_path / "pin"))
    else:
        store = open_store([NvmePath(path=str(tmp_path / "other"))], fronts={BIG: 6_001}, chunk_bytes=2 * CHUNK)
        store.restore(str(tmp_path / "pin"))
    assert behind(store, 6_001) == without_front(state, 6_001)
    # Where that front is not left out, the checkpoint is another one's.
    store.leave_out((), {BIG: 6_000})
    with pytest.raises(LayoutError, match=r"14,010 elements.*wanted.*14,011 elements"):
        store.restore(str(tmp_path / "pin"))


def test_fronts_are_found_again_and_wrong_ones_refused(open_store: Open) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    store.leave_out((), {BIG: 100})
    update_some(store, state, set(), 1)
    store.close()
    store = open_store(fronts={BIG: 100})
    assert behind(store, 100) == without_front(state, 100)
    for front in (0, 20_011, 20_012):
        with pytest.raises(ValueError, match="some, not all of them"):
            store.leave_out((), {BIG: front})
    with pytest.raises(KeyError, match="block9"):
        store.leave_out((), {"block9": 1})

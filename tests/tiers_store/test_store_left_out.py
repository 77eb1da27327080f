"""Shards that leave the store and come back while it is used: exact bytes, no space for what is not there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import SpaceError, StoreError
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
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

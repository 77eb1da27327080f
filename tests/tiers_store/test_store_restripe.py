"""Other shares for the paths: planes move with the writes that happen anyway, and nothing is lost on the way."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_io import FaultyIO
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import CHUNK, FROZEN, SHARDS, State, random_state, read_all, write_all

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import SpaceError, StoreError
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

Open = Callable[..., GenerationStore]
ALL = (*SHARDS, FROZEN)
LARGE = (ShardSpec(name="large", numel=CHUNK * 256, planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2),)),)


def three(tmp_path: Path, bytes: int | None = None) -> list[NvmePath]:
    return [NvmePath(path=str(tmp_path / name), bytes=bytes) for name in "abc"]


def update(store: GenerationStore, state: State, step: int) -> State:
    """Write a part and carry the rest over."""
    new = dict(state)
    with store.begin() as transaction:
        for key, data in state.items():
            if key[0] in ("embedding", "block1", "block3"):
                continue
            new[key] = os.urandom(len(data))
            transaction.write(*key, new[key])
        transaction.copy_rest()
        transaction.commit(step)
    return new


def bytes_by_path(store: GenerationStore) -> list[int]:
    return [wear.written for wear in store.wear()]


@pytest.mark.parametrize("generations", [1, 2, 3])
def test_generations_take_the_new_shares_in_their_turn(tmp_path: Path, open_store: Open, generations: int) -> None:
    store = open_store(three(tmp_path), shards=ALL, generations=generations)
    state = random_state(ALL)
    write_all(store, state, 0)
    assert store.shares == pytest.approx((1 / 3,) * 3, abs=0.01)
    before = bytes_by_path(store)
    assert store.restripe([2, 1, 1]) == generations
    assert store.restripe([2, 1, 1]) == generations  # asked again, nothing has happened yet
    assert bytes_by_path(store) == before
    assert store.shares == pytest.approx((1 / 3,) * 3, abs=0.01)
    assert read_all(store) == state
    for step in range(1, generations + 2):
        state = update(store, state, step)
        assert store.shares == (0.5, 0.25, 0.25)
        assert read_all(store) == state
    assert store.restripe([4, 2, 2]) == 0
    store.close()
    store = open_store(three(tmp_path), shards=ALL, generations=generations)
    assert store.shares == (0.5, 0.25, 0.25)
    assert read_all(store) == state


def test_what_is_written_follows_the_shares(tmp_path: Path, open_store: Open) -> None:
    store = open_store(three(tmp_path), shards=LARGE)
    state = random_state(LARGE)
    write_all(store, state, 0)
    assert store.restripe([5, 2, 1]) == 2
    for step in range(1, 4):
        write_all(store, state, step)
        written = [wear.step_written for wear in store.wear()]
        assert [count / sum(written) for count in written] == pytest.approx([5 / 8, 2 / 8, 1 / 8], abs=0.02)
        assert sum(written) < 1.02 * sum(map(len, state.values()))  # no copy of what is written anyway


def test_a_path_is_left_out_and_taken_back(tmp_path: Path, open_store: Open) -> None:
    store = open_store(three(tmp_path), shards=ALL)
    state = random_state(ALL)
    write_all(store, state, 0)
    store.restripe([1, 0, 1])
    for step in range(1, 3):
        state = update(store, state, step)
    assert store.shares == (0.5, 0, 0.5)
    assert list((tmp_path / "b").rglob("gen-*.bin")) == []
    assert list((tmp_path / "b").rglob("frozen*.bin"))
    store.restripe([1, 1, 1])
    for step in range(3, 5):
        state = update(store, state, step)
    assert store.shares == pytest.approx((1 / 3,) * 3, abs=0.01)
    assert read_all(store) == state
    for weights, problem in [
        ([1, 1], "2 stripe weights for 3 paths"),
        ([0, 0, 0], "need at least one above 0"),
        ([1, -1, 1], "none below"),
        ([1, math.nan, 1], "all finite"),
        ([1, math.inf, 1], "all finite"),
    ]:
        with pytest.raises(ValueError, match=problem):
            store.restripe(weights)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.restripe([1, 1, 1])


def test_an_open_update_and_readers_keep_their_files(tmp_path: Path, open_store: Open) -> None:
    store = open_store(three(tmp_path), verify="always")
    state = random_state()
    write_all(store, state, 0)
    late = bytearray(len(state["block3", Plane.PARAM]))
    handle = store.read("block3", Plane.PARAM, late)
    new = random_state()
    with store.begin() as transaction:
        for index, (key, data) in enumerate(new.items()):
            if index == 3:
                store.restripe([1, 3, 0])
            transaction.write(*key, data)
        transaction.commit(1)
    assert store.shares == pytest.approx((1 / 3,) * 3, abs=0.01)
    assert read_all(store) == new
    handle.wait()
    assert late == state["block3", Plane.PARAM]
    pinned = store.pin(str(tmp_path / "ckpt"))
    for step in range(2, 5):
        latest = random_state()
        write_all(store, latest, step)
        assert read_all(store) == latest
    assert store.shares == (0.25, 0.75, 0)
    store.restore(pinned.directory)
    assert read_all(store) == new


@pytest.mark.parametrize("generations", [1, 2])
def test_without_room_the_files_stay_as_they_are(tmp_path: Path, open_store: Open, generations: int) -> None:
    """All generations fit in the new shares, but not beside an old one: that is said, and training goes on."""
    size = 2 * LARGE[0].numel * generations
    paths = [NvmePath(path=str(tmp_path / "a"), bytes=int(size * 1.05)), NvmePath(path=str(tmp_path / "b"), bytes=size)]
    store = open_store(paths[:1], shards=LARGE, generations=generations)
    state = random_state(LARGE)
    write_all(store, state, 0)
    store.close()
    store = open_store(paths, shards=LARGE, generations=generations)
    with pytest.raises(SpaceError, match="room for"):
        store.restripe([0, 1])
    assert store.restripe([1, 0]) == 0
    store.close()
    tight = [NvmePath(path=paths[0].path, bytes=int(size * 1.05)), NvmePath(path=paths[1].path, bytes=CHUNK * 4)]
    store = open_store(tight, shards=LARGE, generations=generations)
    for step in range(1, 4):
        state = random_state(LARGE)
        write_all(store, state, step)
        assert read_all(store) == state
    assert ("gen-0 keeps the stripes that it has" in store.report()) == (generations == 1)


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_path_that_fails_while_planes_move(tmp_path: Path, open_store: Open, io: AsyncIO, kind: str) -> None:
    shim = FaultyIO(io)
    for number in range(0, 30, 3):
        store = open_store(three(tmp_path), io=shim, job=f"job{number}")
        state = random_state()
        write_all(store, state, 0)
        store.restripe([1, 2, 4])
        shim.arm(kind, number, only="write")
        state = update(store, state, 1)
        shim.disarm()
        assert read_all(store) == state
        if shim.hit:
            failed = next(i for i, path in enumerate(three(tmp_path)) if shim.hit_path.startswith(path.path))
            assert store.shares[failed] == 0
        store.close()
        assert read_all(open_store(three(tmp_path), io=shim, job=f"job{number}")) == state


@settings(max_examples=15, deadline=None)
@given(
    changes=st.lists(
        st.one_of(
            st.tuples(st.just("restripe"), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
            st.tuples(st.sampled_from(["update", "abort", "reopen", "pin"]), st.just([])),
        ),
        max_size=12,
    )
)
def test_any_order_of_changes_keeps_every_bit(
    tmp_path_factory: pytest.TempPathFactory, io: AsyncIO, changes: list[tuple[str, list[int]]]
) -> None:
    root = tmp_path_factory.mktemp("store")

    def opened() -> GenerationStore:
        return GenerationStore.open(three(root), job="j", rank=0, shards=ALL, io=io, chunk_bytes=CHUNK, verify="always")

    store = opened()
    state = random_state(ALL)
    write_all(store, state, 0)
    for step, (what, weights) in enumerate(changes, 1):
        if what == "restripe" and sum(weights):
            store.restripe(weights)
        elif what == "update":
            state = update(store, state, step)
        elif what == "abort":
            with store.begin() as transaction:
                transaction.write("block3", Plane.PARAM, bytes(40_022)).wait()
        elif what == "reopen":
            store.close()
            store = opened()
        elif what == "pin":
            store.pin(str(root / f"pin{step}"))
        assert read_all(store) == state
    store.close(remove=True)
    assert not any((root / name / "j").exists() for name in "abc")

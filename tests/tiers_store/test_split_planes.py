"""Planes that are part in memory and part on (striped) NVMe against plain bytes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import CHUNK

from lamina.aio_native import AsyncIO
from lamina.tiers import (
    Arena,
    BudgetError,
    GenerationStore,
    NvmePath,
    Plane,
    PlaneSpec,
    ShardSpec,
    SplitPiece,
    SplitShard,
    StoreError,
    Tier,
    shard_on,
    split_shard,
)

Open = Callable[..., GenerationStore]
SHARD = ShardSpec(
    name="block",
    numel=20_011,
    planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.EXP_AVG, itemsize=4)),
)
SIZES = {spec.plane: SHARD.plane_bytes(spec.plane) for spec in SHARD.planes}


def pieces_of(host: float, granule: int = 64) -> list[SplitPiece]:
    return split_shard(SHARD, {plane: {Tier.HOST: host, Tier.NVME: 1 - host} for plane in SIZES}, granule=granule)


def whole(split: SplitShard) -> dict[Plane, bytes]:
    found = {}
    for plane, size in SIZES.items():
        buffer = bytearray(size)
        assert split.read(plane, buffer).wait() == size
        found[plane] = bytes(buffer)
    return found


@settings(max_examples=25, deadline=None)
@given(data=st.data(), host=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]), num_paths=st.integers(1, 2))
def test_any_pieces_of_any_split_are_the_plane(
    tmp_path_factory: pytest.TempPathFactory, io: AsyncIO, data: st.DataObject, host: float, num_paths: int
) -> None:
    root = tmp_path_factory.mktemp("split")
    pieces = pieces_of(host)
    stored = shard_on(SHARD, pieces, Tier.NVME)
    filler = ShardSpec(name="filler", numel=1, planes=SHARD.planes[:1])
    paths = [NvmePath(path=str(root / f"disk{index}"), weight=index + 1) for index in range(num_paths)]
    with (
        Arena(Tier.HOST, 200_000) as arena,
        GenerationStore.open(
            paths, job="j", rank=0, shards=[*stored, filler], io=io, chunk_bytes=CHUNK, verify="always"
        ) as store,
    ):
        split = SplitShard(SHARD, pieces, arena=arena, store=store)
        on_host = sum(
            piece.numel * (2 if piece.plane is Plane.PARAM else 4) for piece in pieces if piece.tier is Tier.HOST
        )
        assert arena.used == on_host
        model = {plane: bytearray(size) for plane, size in SIZES.items()}
        for step in range(3):
            with store.begin() as transaction:
                transaction.write("filler", Plane.PARAM, b"xx")
                for plane, size in SIZES.items():
                    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
                    for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
                        if step and data.draw(st.booleans()):
                            continue
                        fresh = os.urandom(end - begin)
                        handle = split.write(transaction, plane, fresh, offset=begin)
                        assert handle.wait() == handle.nbytes == end - begin
                        assert handle.done()
                        model[plane][begin:end] = fresh
                if step:
                    transaction.copy_rest()
                transaction.commit(step)
            if num_paths == 2:
                store.restripe([step + 1, 1])
            assert whole(split) == model
            for plane, size in SIZES.items():
                begin = data.draw(st.integers(0, size))
                buffer = bytearray(data.draw(st.integers(0, size - begin)))
                split.read(plane, buffer, offset=begin).wait()
                assert buffer == model[plane][begin : begin + len(buffer)]
                for offset, view in split.in_memory(plane):
                    assert view == model[plane][offset : offset + len(view)]
                del buffer
                view = None  # the memory goes back with the last view
        split.close()
        split.close()
        assert arena.used == 0
        store.close(remove=True)


def test_an_update_that_is_not_committed_is_no_state(open_store: Open) -> None:
    pieces = pieces_of(0.5)
    store = open_store(shards=shard_on(SHARD, pieces, Tier.NVME))
    with Arena(Tier.HOST, 200_000) as arena:
        split = SplitShard(SHARD, pieces, arena=arena, store=store)
        size = SIZES[Plane.PARAM]
        with store.begin() as transaction:
            for plane, nbytes in SIZES.items():
                split.write(transaction, plane, bytes([1]) * nbytes)
            with pytest.raises(StoreError, match="not committed"):
                split.read(Plane.PARAM, bytearray(size))
            transaction.commit(0)
        assert whole(split)[Plane.PARAM] == bytes([1]) * size
        with store.begin() as transaction:  # aborted, but only nvme's part was written
            split.write(transaction, Plane.PARAM, bytes([2]) * 100, offset=size - 100)
        assert whole(split)[Plane.PARAM] == bytes([1]) * size
        with store.begin() as transaction:
            split.write(transaction, Plane.PARAM, bytes([2]) * 100)
        with pytest.raises(StoreError, match="two steps are mixed: load a checkpoint"):
            split.read(Plane.EXP_AVG, bytearray(10))
        split.close()


def test_what_cannot_be_split_so_is_refused(open_store: Open) -> None:
    pieces = pieces_of(0.5)
    store = open_store(shards=shard_on(SHARD, pieces, Tier.NVME))
    with Arena(Tier.HOST, 200_000) as arena, Arena(Tier.HOST, 50_000) as small:
        with pytest.raises(ValueError, match="no store was opened with it"):
            SplitShard(SHARD, pieces_of(0.25), arena=arena, store=store)
        with pytest.raises(ValueError, match="no store was opened with it"):
            SplitShard(SHARD, pieces, arena=arena, store=None)
        with pytest.raises(ValueError, match="not all of its 20,011 elements"):
            SplitShard(SHARD, pieces[1:], arena=arena, store=store)
        with pytest.raises(BudgetError):
            SplitShard(SHARD, pieces, arena=small, store=store)
        assert arena.used == small.used == 0
        split = SplitShard(SHARD, pieces, arena=arena, store=store)
        with pytest.raises(ValueError, match=r"bytes 40,000 to 40,100 asked for, it has 40,022"):
            split.read(Plane.PARAM, bytearray(100), offset=40_000)
        with pytest.raises(KeyError):
            split.read(Plane.MASTER, bytearray(1))
        split.close()


def test_all_of_it_may_be_in_memory(tmp_path: Path) -> None:
    with Arena(Tier.HOST, 200_000) as arena:
        split = SplitShard(SHARD, pieces_of(1.0), arena=arena, store=None)
        assert whole(split) == {plane: bytes(size) for plane, size in SIZES.items()}
        split.close()

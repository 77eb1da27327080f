"""The engine's loader: every sample once, the same on a second run, and a position that can be resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from lamina.engine.data import ResumableLoader, build_dataloader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def lists(loader: ResumableLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), micro=st.integers(1, 5), world=st.integers(1, 3), drop=st.booleans())
def test_ranks_share_each_epoch(count: int, micro: int, world: int, drop: bool) -> None:
    ranks = [
        build_dataloader(Numbers(count), micro_batch_size=micro, rank=rank, world_size=world, seed=7, drop_last=drop)
        for rank in range(world)
    ]
    epochs = [[lists(loader) for loader in ranks] for _ in range(2)]
    for epoch in epochs:
        seen = [sample for batches in epoch for batch in batches for sample in batch]
        assert len({len(batches) for batches in epoch}) == 1
        if drop:
            assert len(seen) == len(set(seen))
            assert all(len(batch) == micro for batches in epoch for batch in batches)
        else:
            assert set(seen) == set(range(count))
            assert len(seen) == -(-count // world) * world
    if count > 20 and not drop:
        assert epochs[0] != epochs[1]


@given(taken=st.integers(0, 11), saved_late=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_restored_loader_goes_on_with_the_next_batch(taken: int, saved_late: bool) -> None:
    def make(dataset: Dataset[Any]) -> ResumableLoader:
        return build_dataloader(dataset, micro_batch_size=3, rank=1, world_size=2, seed=3)

    straight = [batch.tolist() for batch in itertools.islice(make(Numbers(23)).repeat(), 16)]
    first = make(Numbers(23))
    batches = first.repeat()
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    data = Numbers(23)
    second = make(data)
    if saved_late:
        next(iter(second))
        data.loaded.clear()
    second.load_state_dict(state)
    rest = [batch.tolist() for batch in itertools.islice(second.repeat(), 16 - taken)]
    assert rest == straight[taken:]
    # What was taken before is not loaded again.
    assert data.loaded[: len(rest[0])] == rest[0]


def test_a_loop_that_breaks_off_starts_the_next_epoch() -> None:
    loader = build_dataloader(Numbers(10), micro_batch_size=2, seed=1)
    straight = build_dataloader(Numbers(10), micro_batch_size=2, seed=1)
    epochs = [lists(straight) for _ in range(2)]
    assert next(iter(loader)).tolist() == epochs[0][0]
    assert lists(loader) == epochs[1]
    assert len(loader) == 5


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stream_is_dealt_out_and_resumed(world: int) -> None:
    ranks = [build_dataloader(Stream(13), micro_batch_size=2, rank=rank, world_size=world) for rank in range(world)]
    shares = [lists(loader) for loader in ranks]
    assert sorted(sample for share in shares for batch in share for sample in batch) == list(range(13))
    again = build_dataloader(Stream(13), micro_batch_size=2, rank=world - 1, world_size=world)
    again.load_state_dict({"seed": 0, "epoch": 0, "batches": 1})
    assert lists(again) == shares[world - 1][1:]


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    lists(build_dataloader(Numbers(10), micro_batch_size=2, seed=9))
    assert torch.equal(torch.rand(3), wanted)


def test_collate_is_used() -> None:
    loader = build_dataloader(Numbers(4), micro_batch_size=2, shuffle=False, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 sample, got 0"):
        build_dataloader(Numbers(4), micro_batch_size=0)
    with pytest.raises(ValueError, match="rank 2 and world size 2"):
        build_dataloader(Numbers(4), micro_batch_size=1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="saved with seed 1, and the loader has seed 0"):
        build_dataloader(Numbers(4), micro_batch_size=1).load_state_dict({"seed": 1, "epoch": 0, "batches": 0})
    with pytest.raises(ValueError, match="no batch for this rank"):
        next(build_dataloader(Numbers(4), micro_batch_size=8, drop_last=True).repeat())

"""The engine's data loader: every rank gets its own share of each epoch, and the position can be saved.

[Note: position of the loader]
`state_dict()` counts the batches that were handed out, so a loader restored from it goes on with the next
one, without loading those before. Within one process, iterating anew starts the next epoch (or the same, when
nothing was taken).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

Collate = Callable[[list[Any]], Any]


class _Rest(Sampler[int]):
    """The indices of an epoch less those of the batches that were taken before."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.skip_batches = 0

    def __iter__(self) -> Iterator[int]:
        indices = iter(self.sampler)
        for _ in range(self.skip_batches * self.batch_size):
            next(indices, None)
        return indices

    def __len__(self) -> int:
        return len(self.sampler)


class _Share(IterableDataset[Any]):
    """Every `world_size`-th item of a stream; what the earlier batches took is read past."""

    def __init__(self, stream: IterableDataset[Any], batch_size: int, rank: int, world_size: int) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.skip_batches = 0

    def __iter__(self) -> Iterator[Any]:
        skip = self.skip_batches * self.batch_size * self.world_size
        for index, item in enumerate(self.stream):
            if index >= skip and index % self.world_size == self.rank:
                yield item


class ResumableLoader:
    """Batches of one rank. `epoch` counts from 0, `batches` those handed out in it."""

    def __init__(self, loader: DataLoader[Any], source: _Rest | _Share, seed: int) -> None:
        self.loader = loader
        self.source = source
        self.seed = seed
        self.epoch = 0
        self.batches = 0
        self._resumed = False

    def __len__(self) -> int:
        """Batches of a whole epoch. Raises TypeError for a stream without a length."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.batches and not self._resumed:
            self.epoch, self.batches = self.epoch + 1, 0
        self._resumed = False
        if isinstance(self.source, _Rest):
            self.source.sampler.set_epoch(self.epoch)
        self.source.skip_batches = self.batches
        return self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        for batch in self.loader:
            # Counted before it is handed out: a state saved while the batch is in use does not repeat it.
            self.batches += 1
            yield batch
        self.epoch, self.batches = self.epoch + 1, 0

    def repeat(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch. Raises ValueError when an epoch has none."""
        while True:
            taken = bool(self.batches and self._resumed)
            for batch in self:
                taken = True
                yield batch
            if not taken:
                raise ValueError(
                    "the data has no batch for this rank: it is smaller than one micro-batch per rank "
                    "(dataloader_drop_last), or empty"
                )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the seed and the position."""
        return {"seed": self.seed, "epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the batches that `state` counts.

        Raises ValueError when the state belongs to another seed, whose order is another.
        """
        if int(state["seed"]) != self.seed:
            raise ValueError(f"this position was saved with seed {state['seed']}, and the loader has seed {self.seed}")
        self.epoch = int(state["epoch"])
        self.batches = int(state["batches"])
        self._resumed = True


def build_dataloader(
    dataset: Dataset[Any],
    *,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    collate_fn: Collate | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ResumableLoader:
    """A loader of `micro_batch_size` samples for `rank` of `world_size`.

    A dataset with a length is shuffled by `seed` and the epoch, the same on all ranks, and dealt out. All
    ranks get the same number of samples: without `drop_last` the first of the epoch are repeated to fill up. A
    stream (IterableDataset) is dealt out item by item. The global random state is not touched.
    Raises ValueError for sizes or ranks that cannot be.
    """
    if micro_batch_size < 1:
        raise ValueError(f"want a micro-batch of at least 1 sample, got {micro_batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"want 0 <= rank < world_size, got rank {rank} and world size {world_size}")
    source: _Rest | _Share
    data: Dataset[Any]
    sampler: _Rest | None
    if isinstance(dataset, IterableDataset):
        if num_workers > 1:
            raise ValueError(f"a stream is read by one worker at most, got num_workers {num_workers}")
        data = source = _Share(dataset, micro_batch_size, rank, world_size)
        sampler = None
    else:
        order: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        data = dataset
        sampler = source = _Rest(order, micro_batch_size)
    loader = DataLoader(
        data,
        batch_size=micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Its own generator: an iterator over the loader would otherwise draw from the global one.
        generator=torch.Generator().manual_seed(seed),
    )
    return ResumableLoader(loader, source, seed)

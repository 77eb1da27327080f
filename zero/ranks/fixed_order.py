"""Sums over ranks in rank order, for process groups on the CPU.

[Note: order of sums] Rings and trees add an element's values in an order that follows from its place in what is reduced, so
that from three ranks on the same gradients would give other bits in another layout (a parameter that stays whole, another
grouping). Here every rank gets everybody's values of its own part and adds them from rank 0 on, in fp32, with one rounding
to a narrower dtype. A rank sends what it would send in a reduce-scatter, and gloo's own is slower (4 ranks, 8 Mi fp32
elements: 107 ms, this: 35 ms). Sums of which every rank gets everything (stage 0) are gathered afterwards, and that is slower
than gloo's all-reduce (65 ms, this: 113 ms); two values have one sum, so two ranks use gloo's.
"""

from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from .lanes import Lane, LaneWork

SPARE_BUFFERS = 2  # as many as sums are under way


@dataclass(kw_only=True)
class FixedOrder:
    """``exchanges`` is for the first half of a sum, ``gathers`` for the second half of an all-reduce. Ranks may
    interleave the two kinds differently; each kind comes in one order on all of them."""

    rank: int
    world_size: int
    exchanges: Lane
    gathers: Lane
    _spare: list[torch.Tensor] = field(default_factory=list)

    def start_reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, what: str) -> "SumOfParts":
        """Begin to sum ``flat`` (1-d, world_size equal parts); after ``wait`` this rank's part is in ``shard``."""
        buffer = self._buffer(flat.nbytes)
        received = buffer[: flat.nbytes].view(flat.dtype)
        work = self.exchanges.start(what, dist.all_to_all_single, received, flat)
        return SumOfParts(order=self, work=work, sent=flat, received=received, buffer=buffer, shard=shard)

    def start_all_reduce(self, flat: torch.Tensor, what: str) -> "SumOfAll":
        """Begin to sum ``flat`` (1-d, any length) in place."""
        part = -(-flat.numel() // self.world_size)
        padded = flat
        if part * self.world_size != flat.numel():
            padded = flat.new_zeros(part * self.world_size)
            padded[: flat.numel()].copy_(flat)
        shard = padded[self.rank * part : (self.rank + 1) * part]
        return SumOfAll(part=self.start_reduce_scatter(padded, shard, what), padded=padded, flat=flat)

    def take_back(self, buffer: torch.Tensor) -> None:
        """Memory that was received into, for the next sum."""
        self._spare = [buffer, *self._spare][:SPARE_BUFFERS]

    def _buffer(self, nbytes: int) -> torch.Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= nbytes:
                return self._spare.pop(index)
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(kw_only=True)
class SumOfParts:
    """The exchange under way; ``sent`` is kept until it is over."""

    order: FixedOrder
    work: LaneWork
    sent: torch.Tensor
    received: torch.Tensor
    buffer: torch.Tensor
    shard: torch.Tensor

    def is_completed(self) -> bool:
        """Whether ``wait`` returns without waiting for other ranks."""
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        first, *others = self.received.view(self.order.world_size, -1)
        total = first.float() if first.dtype.itemsize < 4 else first
        for values in others:
            total.add_(values)
        self.shard.copy_(total)
        self.order.take_back(self.buffer)


@dataclass(kw_only=True)
class SumOfAll:
    """A sum of which every rank gets all parts."""

    part: SumOfParts
    padded: torch.Tensor
    flat: torch.Tensor

    def is_completed(self) -> bool:
        """Never: the second half is a collective of its own."""
        return False

    def wait(self) -> None:
        self.part.wait()
        work = self.part.work
        self.part.order.gathers.run(work.what, dist.all_gather_into_tensor, self.padded, self.part.shard)
        if self.padded is not self.flat:
            self.flat.copy_(self.padded[: self.flat.numel()])

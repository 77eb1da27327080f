"""Which slice of a group's flat layout belongs to whom: pure arithmetic.

A *segment* is the part of a param group with one dtype that is either trained or frozen. Its parameters lie one after
the other in a flat buffer, each starting on a 64-byte boundary (of the narrowest dtype, so that the offsets in
elements are the same for every plane); the buffer is padded so that every rank owns an equal shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN_ELEMENTS = 32  # 64 bytes of a 2-byte dtype, 128 of fp32


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in the flat layout; ``offset`` and ``numel`` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Slots in order, the padded length ``numel`` and the number of ranks that share it."""

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int = 1) -> "FlatLayout":
        """Lay out parameters of the given (name, shape); raises ValueError for a world size below 1."""
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: it must be at least 1")
        slots, offset = [], 0
        for name, shape in shapes:
            slot = Slot(name=name, shape=tuple(shape), offset=offset)
            slots.append(slot)
            offset = round_up(slot.end, ALIGN_ELEMENTS)
        return cls(slots=tuple(slots), numel=round_up(offset, ALIGN_ELEMENTS * world_size), world_size=world_size)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First and past-the-last element of the rank's shard."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}: it must be in 0..{self.world_size - 1}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """(slot index, first, past-the-last element relative to the shard) of what the rank's shard holds."""
        begin, end = self.shard_range(rank)
        found = []
        for index, slot in enumerate(self.slots):
            first, last = max(slot.offset, begin), min(slot.end, end)
            if first < last:
                found.append((index, first - begin, last - begin))
        return found

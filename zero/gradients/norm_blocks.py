"""How gradients are cut for the sum of their squares: pure arithmetic.

[Note: order of the norm] Squares are summed in blocks of NORM_BLOCK elements, counted from each parameter's first; inside a
block the kernel has one order, and the blocks of all parameters are added without rounding error. So the sum depends on the
gradients alone: not on tiers, sub-groups or threads, nor on how parameters are grouped and shared out among ranks. Where a
shard begins inside a block, several ranks have a part of it; the one that has its first element gets the others' parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lamina.zero.adam.kernels import NORM_BLOCK
from lamina.zero.groups.partition import FlatLayout


@dataclass(frozen=True, kw_only=True)
class CutBlock:
    """A block of the parameter ``slot`` that lies on several ranks: elements [begin, end) of the flat layout."""

    slot: int
    begin: int
    end: int
    shard_numel: int

    @property
    def owner(self) -> int:
        """The rank that sums it."""
        return self.begin // self.shard_numel

    @property
    def ranks(self) -> range:
        """The ranks that have a part of it, the owner first."""
        return range(self.owner, (self.end - 1) // self.shard_numel + 1)

    def part(self, rank: int) -> tuple[int, int]:
        """The rank's elements of it, counted from the start of its shard; only for one of ``ranks``."""
        begin = rank * self.shard_numel
        return max(self.begin, begin) - begin, min(self.end, begin + self.shard_numel) - begin


def cut_blocks(layout: FlatLayout) -> list[CutBlock]:
    """Every block that a border between two shards goes through, in order."""
    found: dict[int, CutBlock] = {}
    for rank in range(1, layout.world_size):
        border = rank * layout.shard_numel
        for index, slot in enumerate(layout.slots):
            inside = (border - slot.offset) % NORM_BLOCK
            if slot.offset < border < slot.end and inside:
                begin = border - inside
                found[begin] = CutBlock(
                    slot=index, begin=begin, end=min(begin + NORM_BLOCK, slot.end), shard_numel=layout.shard_numel
                )
    return list(found.values())


def whole_blocks(layout: FlatLayout, rank: int) -> Iterator[tuple[int, int, int]]:
    """(slot index, first, past-the-last element relative to the rank's shard) of runs of blocks that it has alone."""
    cut = [(block.slot, block.part(rank)) for block in cut_blocks(layout) if rank in block.ranks]
    for slot, first, last in layout.pieces(rank):
        for begin, end in (part for of, part in cut if of == slot):
            if begin == first:
                first = end
            else:
                last = begin
        if first < last:
            yield slot, first, last

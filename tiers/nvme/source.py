"""The generation before the one that is written."""

from dataclasses import dataclass

from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.layout import PlaneExtent
from lamina.tiers.nvme.slot import Slot


@dataclass(frozen=True, kw_only=True)
class Source:
    """The generation that untouched planes are carried over from."""

    slot: Slot
    sums: ChunkSums
    title: str


def in_source(source: Source, extent: PlaneExtent, offset: int, nbytes: int) -> tuple[PlaneExtent, int, int]:
    """Where bytes of a plane are in the generation before. Raises StoreError where they are not."""
    record = source.slot.record
    kept = None if extent.shard in record.left_out else source.slot.layout.extent(extent.shard, extent.plane)
    if kept is None or extent.front + offset < kept.front:
        raise StoreError(f"{source.title} does not hold {extent.title}: write it, nothing can be carried over")
    return kept, extent.front + offset - kept.front, nbytes

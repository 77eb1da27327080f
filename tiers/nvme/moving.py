"""What a transaction has written of its files is moved to files on other paths, where one of the paths failed."""

from collections.abc import Sequence

from lamina.aio_native import Priority
from lamina.tiers.nvme.chunk_sums import ChunkState, ChunkSums
from lamina.tiers.nvme.handle import TransferHandle
from lamina.tiers.nvme.pending import PendingWrite
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.stream import Piece, Scratch, check_chunks, cut, pump, reader


def move_written(old: Slot, new: Slot, sums: ChunkSums, lost: Sequence[PendingWrite]) -> None:
    """Copy what is written of one slot to another with other stripes, checking it; `lost` bytes are left out.

    Bytes that nobody wrote may be copied along: they are written before a commit, or there is none.
    """
    chunk_bytes = old.layout.chunk_bytes
    bad: set[int] = set()
    for write in lost:
        extent = old.layout.extent(write.extent.shard, write.extent.plane)
        last = (write.offset + write.nbytes - 1) // chunk_bytes
        bad |= {extent.first_chunk + chunk for chunk in range(write.offset // chunk_bytes, last + 1)}
    # A chunk that is lost only in part still has good bytes: copied, but not checked.
    ranges = [
        (extent, chunk * chunk_bytes, sums.chunk_bytes(extent, chunk))
        for extent in old.layout.extents.values()
        for chunk in range(extent.num_chunks)
        if (sums.state(extent.first_chunk + chunk) != ChunkState.ABSENT or sums.in_doubt(extent.first_chunk + chunk))
        and not (
            extent.first_chunk + chunk in bad
            and any(write.covers(extent, chunk * chunk_bytes, sums.chunk_bytes(extent, chunk)) for write in lost)
        )
    ]

    def sink(piece: Piece, view: memoryview) -> TransferHandle:
        index = piece.extent.first_chunk + piece.offset // chunk_bytes
        if index not in bad and sums.state(index) is ChunkState.KNOWN and not sums.in_doubt(index):
            check_chunks(old, sums, piece.extent, piece.offset, view, "a generation being written")
        extent = new.layout.extent(piece.extent.shard, piece.extent.plane)
        return TransferHandle(new.write(extent, piece.offset, view, Priority.WRITE_BACK), view)

    with Scratch(chunk_bytes, 4 * chunk_bytes) as scratch:
        pump(reader(old), cut(ranges, chunk_bytes, chunk_bytes), scratch, sink)

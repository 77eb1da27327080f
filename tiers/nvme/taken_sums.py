"""Checksums of a buffer's pieces that were taken while its bytes were written: joined, they save reading it again."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.aio_native import crc32c, crc32c_join


@dataclass(frozen=True, slots=True)
class TakenSums:
    """The CRC32C of consecutive pieces of a buffer (uint32 each), of piece_nbytes each but for a shorter last one.

    They cover bytes offset to offset + nbytes of the buffer.
    """

    offset: int
    nbytes: int
    piece_nbytes: int
    crcs: memoryview

    def __post_init__(self) -> None:
        wanted = -(-self.nbytes // self.piece_nbytes)
        if len(self.crcs) != wanted or self.crcs.format != "I":
            raise ValueError(f"{self.nbytes} bytes in pieces of {self.piece_nbytes} have {wanted} uint32 checksums")

    def inside(self, start: int, end: int) -> range:
        """The pieces that lie wholly in bytes start to end of the buffer."""
        first = max(0, -(-(start - self.offset) // self.piece_nbytes))
        if end >= self.offset + self.nbytes:
            return range(first, len(self.crcs))
        return range(first, max(first, (end - self.offset) // self.piece_nbytes))


def checksum(view: memoryview, start: int, end: int, taken: Sequence[TakenSums]) -> tuple[int, int]:
    """CRC32C of bytes start to end of a buffer, and how many of them had to be read for it.

    taken: sorted and disjoint; what no whole piece of them covers is read.
    """
    crc, at, num_read = 0, start, 0
    for sums in taken:
        pieces = sums.inside(at, end)
        if not pieces:
            continue
        first = sums.offset + pieces.start * sums.piece_nbytes
        last_nbytes = min(sums.piece_nbytes, sums.nbytes - (pieces.stop - 1) * sums.piece_nbytes)
        if first > at:
            crc = crc32c(view[at:first], crc)
        crc = crc32c_join(crc, sums.crcs[pieces.start : pieces.stop], sums.piece_nbytes, last_nbytes)
        num_read += first - at
        at = first + (len(pieces) - 1) * sums.piece_nbytes + last_nbytes
    if at < end:
        crc = crc32c(view[at:end], crc)
    return crc, num_read + end - at

"""The CRC32C of every chunk of a generation, gathered while its bytes are written in any order and size."""

import enum
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, cycle

from lamina.aio_native import crc32c
from lamina.tiers.nvme.checksum import combine
from lamina.tiers.nvme.layout import Layout, PlaneExtent
from lamina.tiers.nvme.taken_sums import TakenSums, checksum


class ChunkState(enum.IntEnum):
    """What is known of a chunk. Legal moves: any write of a whole chunk leads to KNOWN; a part leads from
    ABSENT to PARTIAL, from PARTIAL to PARTIAL, KNOWN or STALE, and from KNOWN or STALE to STALE; recompute()
    to KNOWN."""

    ABSENT = 0
    PARTIAL = 1
    STALE = 2  # every byte was written, but overlapping writes hide the checksum: it is taken from the file
    KNOWN = 3


_Piece = tuple[int, int, int | None]  # start, end, CRC32C or None


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes start to end of a chunk (counted within the layout) of `whole` bytes, their CRC32C, and how many of them were
    read for it."""

    index: int
    start: int
    end: int
    whole: int
    crc: int
    num_read: int = 0


class ChunkSums:
    """Coverage and checksums of one layout's chunks. Not thread safe: its owner locks."""

    def __init__(self, layout: Layout, values: "array[int] | None" = None) -> None:
        self.layout = layout
        num = layout.num_chunks
        self.values: array[int] = array("I", bytes(4 * num)) if values is None else values
        self._states = bytearray([ChunkState.ABSENT if values is None else ChunkState.KNOWN]) * num
        self._pieces: dict[int, list[_Piece]] = {}
        self._announced: Counter[int] = Counter()
        self.num_read = 0  # bytes that were read only for their checksums

    def state(self, index: int) -> ChunkState:
        """State of a chunk, counted within the layout."""
        return ChunkState(self._states[index])

    def chunk_bytes(self, extent: PlaneExtent, chunk: int) -> int:
        """Bytes of a chunk, counted within the plane."""
        return min(self.layout.chunk_bytes, extent.nbytes - chunk * self.layout.chunk_bytes)

    def announce(self, extent: PlaneExtent, offset: int, nbytes: int) -> None:
        """Note that these bytes are being written and that put() will tell their checksums."""
        self._announced.update(self._chunks(extent, offset, nbytes))

    def in_doubt(self, index: int) -> bool:
        """Whether a chunk (counted within the layout) is being written and its checksum is not yet told."""
        return self._announced[index] > 0

    def _chunks(self, extent: PlaneExtent, offset: int, nbytes: int) -> range:
        first = extent.first_chunk + offset // self.layout.chunk_bytes
        return (
            range(first, extent.first_chunk + -(-(offset + nbytes) // self.layout.chunk_bytes)) if nbytes else range(0)
        )

    def measure(
        self, extent: PlaneExtent, offset: int, view: memoryview, taken: Sequence[TakenSums] = ()
    ) -> "list[Measured]":
        """Checksums of the pieces of bytes at byte `offset` of a plane; reads them once, but for what is taken already."""
        measured = []
        done = 0
        while done < len(view):
            chunk, inside = divmod(offset + done, self.layout.chunk_bytes)
            whole = self.chunk_bytes(extent, chunk)
            size = min(whole - inside, len(view) - done)
            crc, num_read = checksum(view, done, done + size, taken)
            measured.append(Measured(extent.first_chunk + chunk, inside, inside + size, whole, crc, num_read))
            done += size
        return measured

    def known(self, extent: PlaneExtent, offset: int, nbytes: int, into: PlaneExtent) -> "list[Measured]":
        """The checksums of the whole chunks of a range, as measure() of the same plane ``into`` another layout would find
        them in undamaged bytes."""
        moved = into.first_chunk - extent.first_chunk
        return [
            Measured(index + moved, 0, whole, whole, self.values[index])
            for index in self._chunks(extent, offset, nbytes)
            for whole in [self.chunk_bytes(extent, index - extent.first_chunk)]
        ]

    def put(self, measured: "list[Measured]") -> None:
        """Note that these pieces, announced before, were written."""
        for piece in measured:
            self._announced[piece.index] -= 1
            if self._announced[piece.index] <= 0:
                del self._announced[piece.index]
            self.num_read += piece.num_read
            self._note(piece.index, piece.start, piece.end, piece.whole, piece.crc)

    def _note(self, index: int, start: int, end: int, whole: int, crc: int) -> None:
        if end - start == whole:
            self._pieces.pop(index, None)
            self._settle(index, crc)
        elif self._states[index] >= ChunkState.STALE:
            self._settle(index, None)
        else:
            self._states[index] = ChunkState.PARTIAL
            pieces = _insert(self._pieces.get(index, []), (start, end, crc))
            if pieces[0][:2] == (0, whole):
                self._pieces.pop(index, None)
                self._settle(index, pieces[0][2])
            else:
                self._pieces[index] = pieces

    def _settle(self, index: int, crc: int | None) -> None:
        if crc is None:
            self._states[index] = ChunkState.STALE
        else:
            self._states[index] = ChunkState.KNOWN
            self.values[index] = crc

    def recompute(self, extent: PlaneExtent, chunk: int, view: memoryview) -> None:
        """Settle a stale chunk from its bytes in the file."""
        self._settle(extent.first_chunk + chunk, crc32c(view))

    def gaps(self, extent: PlaneExtent) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) of what was not written of a plane, in order, neighbours joined."""
        states = self._states[extent.first_chunk : extent.first_chunk + extent.num_chunks]
        if not states or min(states) >= ChunkState.STALE:
            return  # the usual case, without a look at every chunk
        start = end = -1
        for at, size in self._chunk_gaps(extent):
            if at == end:
                end += size
            else:
                if end > start:
                    yield start, end - start
                start, end = at, at + size
        if end > start:
            yield start, end - start

    def _chunk_gaps(self, extent: PlaneExtent) -> Iterator[tuple[int, int]]:
        for chunk in range(extent.num_chunks):
            index = extent.first_chunk + chunk
            if self._states[index] >= ChunkState.STALE:
                continue
            base, at = chunk * self.layout.chunk_bytes, 0
            whole = self.chunk_bytes(extent, chunk)
            for start, end, _ in [*self._pieces.get(index, []), (whole, whole, None)]:
                if start > at:
                    yield base + at, start - at
                at = end

    def stale(self, extent: PlaneExtent) -> Iterator[int]:
        """Chunks of a plane whose checksum has to be taken from the file."""
        for chunk in range(extent.num_chunks):
            if self._states[extent.first_chunk + chunk] == ChunkState.STALE:
                yield chunk

    def covered(self, extent: PlaneExtent, offset: int, nbytes: int) -> bool:
        """Whether every one of these bytes was written."""
        end = offset + nbytes
        return nbytes == 0 or all(at >= end or at + size <= offset for at, size in self.gaps(extent))

    def relaid(self, layout: Layout) -> "ChunkSums":
        """The same knowledge about the same planes dealt to stripes otherwise."""
        other = ChunkSums(layout, self.values)
        other._states = self._states
        other._pieces = self._pieces
        other._announced = self._announced
        other.num_read = self.num_read
        return other

    def tables(self) -> list[bytes]:
        """Each stripe's checksum table as it lies in the file: uint32, little endian."""
        pattern = self.layout.pattern
        if len(pattern) == 1:
            return [self.values.tobytes() if stripe == pattern[0] else b"" for stripe in range(len(self.layout.counts))]
        tables = []
        for stripe in range(len(self.layout.counts)):
            mine = cycle([dealt == stripe for dealt in pattern])
            tables.append(array("I", compress(self.values, mine)).tobytes())
        return tables

    @classmethod
    def from_tables(cls, layout: Layout, tables: list[bytes]) -> "ChunkSums":
        """The inverse of tables()."""
        if len(layout.pattern) == 1:
            return cls(layout, array("I", tables[layout.pattern[0]]))
        rows = [iter(array("I", table)) for table in tables]
        pattern = layout.pattern
        return cls(layout, array("I", [next(rows[pattern[i % len(pattern)]]) for i in range(layout.num_chunks)]))


def _insert(pieces: list[_Piece], new: _Piece) -> list[_Piece]:
    """Sorted disjoint pieces with one more; what touches is joined, what overlaps loses its checksum."""
    start, end, crc = new
    before = [piece for piece in pieces if piece[1] < start]
    after = [piece for piece in pieces if piece[0] > end]
    for other_start, other_end, other in pieces[len(before) : len(pieces) - len(after)]:
        if crc is None or other is None:
            crc = None
        elif other_end == start:
            crc = combine(other, crc, end - start)
        elif other_start == end:
            crc = combine(crc, other, other_end - other_start)
        elif (other_start, other_end) != (start, end):
            crc = None
        start, end = min(start, other_start), max(end, other_end)
    return [*before, (start, end, crc), *after]

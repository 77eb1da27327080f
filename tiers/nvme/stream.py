"""Streaming over a generation with a few buffers: reads ahead, writes behind, checks every chunk."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lamina.aio_native import AlignedBuffer, Priority, crc32c
from lamina.tiers.errors import IntegrityError
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.handle import TransferHandle
from lamina.tiers.nvme.layout import Layout, PlaneExtent, align_up
from lamina.tiers.nvme.slot import Slot

SCRATCH_BYTES = 16 << 20
"""Memory that streaming takes for as long as it runs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a plane that are moved at once; both ends on chunk borders or at the end of the plane.

    start, end: the part of it (counted from offset) that was asked for.
    """

    extent: PlaneExtent
    offset: int
    nbytes: int
    start: int
    end: int


def whole_planes(layout: Layout) -> Iterator[tuple[PlaneExtent, int, int]]:
    """Every plane from end to end."""
    for extent in layout.extents.values():
        yield extent, 0, extent.nbytes


def cut(ranges: Iterable[tuple[PlaneExtent, int, int]], chunk_bytes: int, piece_bytes: int) -> Iterator[Piece]:
    """Ranges widened to whole chunks and cut into pieces of whole chunks."""
    for extent, offset, nbytes in ranges:
        at = offset - offset % chunk_bytes
        end = min(align_up(offset + nbytes, chunk_bytes), extent.nbytes)
        while at < end:
            size = min(piece_bytes, end - at)
            yield Piece(extent, at, size, max(0, offset - at), min(size, offset + nbytes - at))
            at += size


def check_chunks(slot: Slot, sums: ChunkSums, extent: PlaneExtent, offset: int, view: memoryview, what: str) -> None:
    """Check the whole chunks among these bytes of a plane. Raises IntegrityError for the first that
    differs."""
    chunk_bytes = slot.layout.chunk_bytes
    chunk = -(-offset // chunk_bytes)
    while chunk < extent.num_chunks:
        start = chunk * chunk_bytes - offset
        size = sums.chunk_bytes(extent, chunk)
        if start + size > len(view):
            return
        found = crc32c(view[start : start + size])
        expected = sums.values[extent.first_chunk + chunk]
        if found != expected:
            raise damage(slot, extent, chunk, expected, found, what)
        chunk += 1


def check_edges(slot: Slot, sums: ChunkSums, extent: PlaneExtent, offset: int, view: memoryview, what: str) -> None:
    """Check the chunks of which these bytes are only a part, by reading them whole. Raises IntegrityError, OSError."""
    chunk_bytes = slot.layout.chunk_bytes
    end = offset + len(view)
    for chunk in {offset // chunk_bytes, max(offset, end - 1) // chunk_bytes} if len(view) else ():
        start = chunk * chunk_bytes
        size = sums.chunk_bytes(extent, chunk)
        if offset <= start and start + size <= end:
            continue
        whole = memoryview(bytearray(size))
        TransferHandle(slot.read(extent, start, whole, Priority.DEMAND), whole).wait()
        check_chunks(slot, sums, extent, start, whole, what)
        first, last = max(start, offset), min(start + size, end)
        if whole[first - start : last - start] != view[first - offset : last - offset]:
            expected = sums.values[extent.first_chunk + chunk]
            raise damage(slot, extent, chunk, expected, crc32c(view[first - offset : last - offset]), what)


def damage(slot: Slot, extent: PlaneExtent, chunk: int, expected: int, found: int, what: str) -> IntegrityError:
    """The error for a chunk that is not what was written."""
    stripe, offset = slot.layout.chunk_place(slot.layout.extent(extent.shard, extent.plane), chunk)
    path = str(slot.files[stripe].path) if stripe in slot.files else slot.record.names()[stripe]
    return IntegrityError(
        f"{path}: chunk {chunk} of {extent.title} ({what}) at offset {offset:,} is damaged: CRC32C expected "
        f"{expected:08x}, found {found:08x}. The disk or another program changed it: restore from a "
        "checkpoint",
        path=path,
        offset=offset,
        chunk=chunk,
        expected=expected,
        found=found,
        shard=extent.shard,
        plane=str(extent.plane),
    )


class Scratch:
    """A few I/O buffers, allocated on first use. Context manager."""

    def __init__(self, chunk_bytes: int, nbytes: int = SCRATCH_BYTES) -> None:
        count = 4 if nbytes >= 4 * chunk_bytes else 2
        self.piece_bytes = max(chunk_bytes, nbytes // count // chunk_bytes * chunk_bytes)
        self._memory = AlignedBuffer(count * self.piece_bytes)
        self.views = [
            self._memory.view[index * self.piece_bytes : (index + 1) * self.piece_bytes] for index in range(count)
        ]

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *exc: object) -> None:
        for view in self.views:
            with contextlib.suppress(BufferError):  # a traceback may still show it: then the collector unmaps it
                view.release()
        self.views = []
        with contextlib.suppress(BufferError):
            self._memory.close()


class Sized(Protocol):
    """Anything that is moved at once."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""


P = TypeVar("P", bound=Sized)
Start = Callable[[P, memoryview], TransferHandle]
Sink = Callable[[P, memoryview], TransferHandle | None]


def pump(start: Start[P], pieces: Iterable[P], scratch: Scratch, sink: Sink[P]) -> None:
    """Read every piece in order and give it to the sink, which may answer with a write that still needs the bytes.

    start begins the read of a piece into a buffer. At most the scratch buffers are in flight. Raises the first failure
    once nothing touches the buffers any more.
    """
    free = deque(scratch.views)
    reading: deque[tuple[P, memoryview, TransferHandle]] = deque()
    writing: deque[tuple[memoryview, TransferHandle]] = deque()
    rest = iter(pieces)
    try:
        while True:
            while free and (piece := next(rest, None)) is not None:
                buffer = free.popleft()
                reading.append((piece, buffer, start(piece, buffer[: piece.nbytes])))
            if reading:
                piece, buffer, handle = reading[0]
                handle.wait()
                written = sink(piece, buffer[: piece.nbytes])
                reading.popleft()
                if written is None:
                    free.append(buffer)
                else:
                    writing.append((buffer, written))
            elif not writing:
                return
            while writing and (not reading or writing[0][1].done()):
                buffer, handle = writing[0]
                handle.wait()
                writing.popleft()
                free.append(buffer)
    finally:
        for _, _, handle in reading:
            handle.drain()
        for _, handle in writing:
            handle.drain()


def reader(source: Slot, priority: Priority = Priority.PREFETCH) -> Start[Piece]:
    """Reads pieces of a slot's planes, for pump()."""

    def start(piece: Piece, view: memoryview) -> TransferHandle:
        return TransferHandle(source.read(piece.extent, piece.offset, view, priority), view)

    return start


def verify(
    slot: Slot,
    sums: ChunkSums,
    what: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Read a whole slot and check every chunk. progress(done, total) in bytes. Raises IntegrityError."""
    done = 0

    def check(piece: Piece, view: memoryview) -> None:
        nonlocal done
        check_chunks(slot, sums, piece.extent, piece.offset, view, what)
        done += piece.nbytes
        if progress is not None:
            progress(done, slot.layout.payload_bytes)

    with Scratch(slot.layout.chunk_bytes, scratch_bytes) as scratch:
        pump(reader(slot), cut(whole_planes(slot.layout), slot.layout.chunk_bytes, scratch.piece_bytes), scratch, check)

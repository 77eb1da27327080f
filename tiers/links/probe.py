"""A short measurement of a folder's disk, taken before training so that a step's lower bound is known."""

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.aio_native import AlignedBuffer, AsyncIO, File, Priority, Read, Write

PROBE_BYTES = 48 << 20
"""Of the file, and of the memory that it is moved through. Through a few MiB over and over transfers are a quarter faster than in
a step, whose buffers no processor's cache holds."""
REQUEST_BYTES = 8 << 20
ROUNDS = 3
MIX_BYTES = 256 << 20
"""Of a probe of a mix, in both directions together."""
MIX_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Sequential bandwidth of one folder in bytes per second, rewriting in place and reading back."""

    read: float
    write: float
    direct: bool

    @property
    def mixed(self) -> float:
        """Bytes per second, both directions together, of a mix that reads as much as it writes."""
        return 2 / (1 / self.read + 1 / self.write)

    def seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Time for both on a half-duplex disk: the two add up (measured mixes lie within 5 percent of this)."""
        return read_bytes / self.read + written_bytes / self.write


def probe_disk(io: AsyncIO, folder: str | Path, nbytes: int = PROBE_BYTES) -> DiskSpeed:
    """Write, rewrite and read a file of ``nbytes`` through as much memory; medians over a few rounds. The file has no name
    while it is used.

    Raises OSError when the folder cannot be written or has no room.
    """
    with _filled_file(io, folder, nbytes) as (file, buffer):
        pieces = [(buffer.view[at : at + REQUEST_BYTES], at) for at in range(0, nbytes, REQUEST_BYTES)]
        out = [Write(file, view, at) for view, at in pieces]
        back = [Read(file, view, at) for view, at in pieces]
        writes, reads = [], []
        for _ in range(ROUNDS):
            writes.append(_seconds(io, out, Priority.WRITE_BACK))
            reads.append(_seconds(io, back, Priority.DEMAND))
        direct = file.direct
    return DiskSpeed(read=nbytes / statistics.median(reads), write=nbytes / statistics.median(writes), direct=direct)


def probe_mix(
    io: AsyncIO, folder: str | Path, *, read_bytes: int, written_bytes: int, rounds: int = ROUNDS
) -> list[float]:
    """Seconds in which the disk moves so many bytes each way at its best, one figure for each round: side by side, or all reads
    and then all writes, whichever is quicker. Of large amounts a part is moved, in the same proportion, through as much memory.

    Raises OSError when the folder cannot be written or has no room, ValueError when there is nothing to move.
    """
    total = read_bytes + written_bytes
    if min(read_bytes, written_bytes) < 0 or not total:
        raise ValueError(
            f"{read_bytes:,} bytes to read and {written_bytes:,} to write: want at least one byte, and no less than 0"
        )
    share = min(1.0, MIX_BYTES / total)
    num_read, num_written = (-(-round(nbytes * share) // MIX_REQUEST_BYTES) for nbytes in (read_bytes, written_bytes))
    num = num_read + num_written
    with _filled_file(io, folder, num * MIX_REQUEST_BYTES) as (file, buffer):
        pieces = [
            (buffer.view[at : at + MIX_REQUEST_BYTES], at) for at in range(0, len(buffer.view), MIX_REQUEST_BYTES)
        ]
        reads: list[Read | Write] = [Read(file, view, at) for view, at in pieces[:num_read]]
        writes: list[Read | Write] = [Write(file, view, at) for view, at in pieces[num_read:]]
        mixed = [request for _, request in sorted([*_spread(reads), *_spread(writes)], key=lambda place: place[0])]
        taken = [min(_seconds(io, mixed), _seconds(io, reads) + _seconds(io, writes)) for _ in range(rounds)]
    return [seconds * total / (num * MIX_REQUEST_BYTES) for seconds in taken]


def _spread(requests: Sequence[Read | Write]) -> Iterator[tuple[float, Read | Write]]:
    """Requests with places between 0 and 1, evenly apart."""
    yield from (((index + 0.5) / len(requests), request) for index, request in enumerate(requests))


@contextlib.contextmanager
def _filled_file(io: AsyncIO, folder: str | Path, nbytes: int) -> Iterator[tuple[File, AlignedBuffer]]:
    """A file without a name, written once, since the first write to fresh extents is slower, and as much memory."""
    path = Path(folder) / f"probe-{os.getpid()}.tmp"
    with AlignedBuffer(nbytes) as buffer:
        ctypes.memset(buffer.address, 1, nbytes)  # memory that was never written is one page of zeros for all of it
        file = io.open(path, writable=True, create=True, size=nbytes)
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            io.submit([Write(file, buffer.view, 0)], priority=Priority.WRITE_BACK).wait()
            yield file, buffer
        finally:
            file.close()


def _seconds(io: AsyncIO, requests: Sequence[Read | Write], priority: Priority = Priority.WRITE_BACK) -> float:
    if not requests:
        return 0.0
    began = time.perf_counter()
    io.submit(requests, priority=priority).wait()
    return time.perf_counter() - began

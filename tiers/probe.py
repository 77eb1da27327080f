"""A short measurement of a folder's disk, taken before training so that a step's lower bound is known."""

import contextlib
import ctypes
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from lamina.aio_native import AlignedBuffer, AsyncIO, Priority, Read, Write

PROBE_BYTES = 48 << 20
"""Of the file, and of the memory that it is moved through. Through a few MiB over and over transfers are a quarter faster than in
a step, whose buffers no processor's cache holds."""
REQUEST_BYTES = 8 << 20
ROUNDS = 3


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
    path = Path(folder) / f"probe-{os.getpid()}.tmp"
    with AlignedBuffer(nbytes) as buffer:
        ctypes.memset(buffer.address, 1, nbytes)  # memory that was never written is one page of zeros for all of it
        file = io.open(path, writable=True, create=True, size=nbytes)
        pieces = [(buffer.view[at : at + REQUEST_BYTES], at) for at in range(0, nbytes, REQUEST_BYTES)]
        out = [Write(file, view, at) for view, at in pieces]
        back = [Read(file, view, at) for view, at in pieces]
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            io.submit(out, priority=Priority.WRITE_BACK).wait()  # extends the file: slower, not counted
            writes, reads = [], []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                io.submit(out, priority=Priority.WRITE_BACK).wait()
                written = time.perf_counter()
                io.submit(back, priority=Priority.DEMAND).wait()
                reads.append(time.perf_counter() - written)
                writes.append(written - began)
            direct = file.direct
        finally:
            file.close()
    return DiskSpeed(read=nbytes / statistics.median(reads), write=nbytes / statistics.median(writes), direct=direct)

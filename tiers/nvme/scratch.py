"""A scratch file in a rank's folder: bytes that need not outlive the process, such as gradients beyond the host budget."""

import contextlib
import os

from lamina.aio_native import AsyncIO, Priority
from lamina.tiers.nvme.folder import RankFolder
from lamina.tiers.nvme.handle import as_bytes

SCRATCH_NAME = "scratch.bin"


class Scratch:
    """One file of fixed size whose name is gone as soon as it is open, so that nothing is left behind, also by kill -9.

    Raises OSError (path, offset, wanted, got) when the disk is full at the start, or fails later.
    """

    def __init__(self, folder: RankFolder, io: AsyncIO, nbytes: int) -> None:
        path = folder.file(SCRATCH_NAME)
        folder.remove([SCRATCH_NAME])
        self.nbytes = nbytes
        self.bytes_written = 0
        self.bytes_read = 0
        self._io = io
        try:
            self._file = io.open(path, writable=True, create=True, exclusive=True, size=nbytes)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes and wait for it. Raises ValueError beyond the end."""
        self._check(offset, view)
        self._io.write(self._file, as_bytes(view), offset, priority=Priority.WRITE_BACK).wait()
        self.bytes_written += view.nbytes

    def read(self, offset: int, view: memoryview) -> None:
        """Fill the view and wait for it. Raises ValueError beyond the end."""
        self._check(offset, view)
        self._io.read(self._file, as_bytes(view), offset, priority=Priority.DEMAND).wait()
        self.bytes_read += view.nbytes

    def close(self) -> None:
        """Give the disk space back. Harmless when repeated."""
        self._file.close()

    def _check(self, offset: int, view: memoryview) -> None:
        if offset < 0 or offset + view.nbytes > self.nbytes:
            raise ValueError(f"scratch file: bytes {offset} to {offset + view.nbytes} of {self.nbytes} were asked for")

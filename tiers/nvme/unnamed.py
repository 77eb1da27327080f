"""An unnamed file for bytes that come and go within a step: it grows as needed and is gone with the process."""

import os
import tempfile
from collections import deque

from lamina.aio_native import AsyncIO, Handle, Priority
from lamina.tiers.errors import BudgetError
from lamina.tiers.memory.freelist import FreeList

PAGE = 4096
GROWTH_BYTES = 64 << 20


class UnnamedFile:
    """Places in one file without a name (mode 0600), cut at pages; freed places are used again. Not thread safe.

    ``limit``: bytes that it may take, None for what the disk has. Raises OSError when the folder cannot have such a file.
    """

    def __init__(self, folder: str, io: AsyncIO, *, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit
        self._io = io
        self._holes = FreeList(0)
        self._leaving: deque[tuple[int, int, Handle]] = deque()
        self.nbytes = 0
        """Bytes of the file so far, which is also the most that it has held."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            self._fd = os.dup(file.fileno())
        try:
            self._file = io.open(f"/proc/self/fd/{self._fd}", writable=True)
        except BaseException:
            os.close(self._fd)
            raise

    def take(self, nbytes: int, owner: str) -> int:
        """The offset of a place. Raises BudgetError beyond the limit, OSError when the disk is full."""
        self._reap()
        size = _pages(nbytes)
        offset = self._holes.take(size, PAGE)
        if offset is None:
            self._grow(size, owner)
            offset = self._holes.take(size, PAGE)
        if offset is None:
            raise RuntimeError(f"{owner}: no place of {size:,} bytes although the file grew")
        return offset

    def give_back(self, offset: int, nbytes: int, last: Handle | None = None) -> None:
        """The place can be used again, once its last transfer has ended."""
        if last is not None and not last.done():
            self._leaving.append((offset, _pages(nbytes), last))
        else:
            self._holes.give(offset, _pages(nbytes))

    def write(self, offset: int, view: memoryview) -> Handle:
        return self._io.write(self._file, view, offset, priority=Priority.WRITE_BACK)

    def read(self, offset: int, view: memoryview, priority: Priority) -> Handle:
        return self._io.read(self._file, view, offset, priority=priority)

    def _reap(self) -> None:
        for _ in range(len(self._leaving)):
            offset, size, last = self._leaving.popleft()
            if last.done():
                self._holes.give(offset, size)
            else:
                self._leaving.append((offset, size, last))

    def _grow(self, size: int, owner: str) -> None:
        left = None if self.limit is None else self.limit - self.nbytes
        if left is not None and left < size:
            raise BudgetError(
                f"{owner} wants {size:,} bytes of an unnamed file in {self.folder}, which holds {self.nbytes:,} and may have "
                f"{self.limit:,}. Raise the bytes of that path in tiers.nvme, or use smaller micro-batches",
                owner=owner,
                wanted=size,
                free=max(0, left),
                budget=self.limit or 0,
                largest=self._holes.largest,
            )
        more = max(size, GROWTH_BYTES) if left is None else max(size, min(GROWTH_BYTES, left // PAGE * PAGE))
        try:
            os.posix_fallocate(self._fd, self.nbytes, more)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}: {owner} wants {more:,} more bytes beside {self.nbytes:,} in an unnamed file",
                self.folder,
            ) from error
        self._holes.give(self.nbytes, more)
        self.nbytes += more

    def close(self) -> None:
        """Give the disk space back. Harmless when repeated."""
        self._file.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pages(nbytes: int) -> int:
    return max(PAGE, -(-nbytes // PAGE) * PAGE)

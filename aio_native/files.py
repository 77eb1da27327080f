"""A file that an AsyncIO has open."""

import contextlib
import errno
import os
import stat
from types import TracebackType
from typing import Self

from .core import Core
from .errors import AsyncIOError, ClosedIOError, errno_name
from .opening import Opened


class File:
    """Made by AsyncIO.open. Descriptors belong to the engine and are closed by close() or with the AsyncIO."""

    def __init__(self, core: Core, path: str, opened: Opened, number: int, writable: bool) -> None:
        self._core = core
        self._number = number
        self._opened = opened
        self.path = path
        self.writable = writable
        self.direct = opened.direct
        """Whether transfers bypass the page cache."""
        self.alignment = opened.offset_align
        """Bytes; requests aligned to this (offset, length and address) need no bounce memory. 1 when not direct."""
        self.reason = opened.reason
        """Why it is direct, or not."""
        self.file_system = opened.file_system
        self.preallocated = opened.preallocated
        """Whether disk space for `size` bytes was reserved at open."""

    @property
    def number(self) -> int:
        """The engine's name for the file. Raises ClosedIOError after close()."""
        if not self._number:
            raise ClosedIOError(errno.EBADF, f"{self.path} is closed", path=self.path)
        return self._number

    @property
    def core(self) -> Core:
        return self._core

    @property
    def size(self) -> int:
        """Bytes now (of a block device too)."""
        self._core.check()
        if not self._number:
            raise ClosedIOError(errno.EBADF, f"{self.path} is closed", path=self.path)
        status = os.fstat(self._opened.fd)
        block = stat.S_ISBLK(status.st_mode)
        return os.lseek(self._opened.fd, 0, os.SEEK_END) if block else status.st_size

    def close(self) -> None:
        """Waits for the file's transfers and closes it; idempotent. Raises AsyncIOError when close() itself reports one."""
        if self._core.closed or os.getpid() != self._core.pid:
            self._number = 0
            return
        number, self._number = self._number, 0
        if not number:
            return
        rc = -self._core.lib.lamina_file_remove(self._core.pointer, number)
        if rc and rc != errno.EBADF:
            raise AsyncIOError(rc, f"closing {self.path} failed: {errno_name(rc)}", path=self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Handles hold their file, so nothing is in flight and this does not wait.
        with contextlib.suppress(AsyncIOError, AttributeError):
            self.close()

    def __repr__(self) -> str:
        how = f"direct, alignment {self.alignment}" if self.direct else "buffered"
        return f"File({self.path!r}, {how}{'' if self._number else ', closed'})"

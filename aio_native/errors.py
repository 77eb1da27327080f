"""What can go wrong with a transfer. Everything is an OSError, so that `errno` works as it does elsewhere."""

import errno
import os


def errno_name(number: int) -> str:
    """``ENOSPC (No space left on device)``."""
    return f"{errno.errorcode.get(number, f'errno {number}')} ({os.strerror(number)})"


class AsyncIOError(OSError):
    """A file operation failed.

    Attributes (None where they do not apply): ``path``, ``offset`` and ``wanted`` (bytes) of the request that failed,
    ``got`` (bytes from its start that are good). ``errno`` is always set.
    """

    def __init__(
        self,
        number: int,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        got: int | None = None,
    ) -> None:
        super().__init__(number, message, path)
        self.message = message
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got

    def __str__(self) -> str:
        return self.message


class ShortIOError(AsyncIOError):
    """The file ended before the request did (errno ENODATA)."""


class CancelledIOError(AsyncIOError):
    """The request was cancelled before all of it had started (errno ECANCELED)."""


class BackendUnavailableError(AsyncIOError):
    """The backend that was asked for cannot work on this machine."""


class ClosedIOError(AsyncIOError):
    """The AsyncIO or the File is closed (errno EBADF)."""


class ForkedIOError(AsyncIOError):
    """Used in a child of the process that opened it (errno EPERM)."""


class AsyncIOWarning(UserWarning):
    """Works, but not the way that was wished for."""


class RegistrationWarning(AsyncIOWarning):
    """Memory could not be registered with the kernel: transfers are right but cost more CPU."""


class BufferedIOWarning(AsyncIOWarning):
    """The file system has no direct I/O: transfers go through the page cache."""


class PreallocationWarning(AsyncIOWarning):
    """Disk space could not be reserved beforehand: a full disk shows only when it is written."""


class UnseenErrorWarning(AsyncIOWarning):
    """A transfer failed and nobody waited for it."""

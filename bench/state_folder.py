"""The folder under which a run keeps its state on NVMe, made when it is missing and taken away again."""

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self


def why_not_writable(path: Path) -> int:
    """0 when the user may write to an existing file or folder, else the errno that says why not."""
    wanted = os.R_OK | os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    if os.access(path, wanted):
        return 0
    return errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES


class StateFolder:
    """A context manager. Folders that it made (mode 0700) are removed at exit when they are empty."""

    def __init__(self, path: Path, *, option: str) -> None:
        """`path` is absolute; `option` is the name by which error messages call it."""
        self.path = path
        self._option = option
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        """Raises OSError, with the path, when the folder cannot be made or written."""
        try:
            self._make()
        except OSError as error:
            self._remove_made()
            raise OSError(error.errno, f"{self._option}: {error.strerror}", str(error.filename)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_made()

    def _make(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700)
            self._made.append(folder)
        if not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        number = why_not_writable(self.path)
        if number:
            raise OSError(number, os.strerror(number), str(self.path))

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: somebody else put something there
                folder.rmdir()
        self._made.clear()

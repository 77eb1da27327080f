"""The private folder that a run works in, and what earlier runs of ours left behind.

[Note: leftovers] A run that is killed cannot clean up. Its folder has a name of ours, belongs to the same user with mode
0700, and holds a lock file with our mark that nobody locks any more: only then does a later run remove it, and in it only
files with names that we give. Anything else is left where it is.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = b"made by `lamina nvme`: may be removed when nobody holds a lock on this file\n"
LOCK = "lamina-nvme.lock"
_FOLDER = re.compile(r"\.lamina-nvme-[0-9a-f]{16}")
_DATA = re.compile(r"(data|fio|store)-[0-9]+(-[0-9]+)?\.bin")


class FolderError(OSError):
    """The folder cannot be worked in; the text says why and what to do, `errno` is the system's."""

    def __str__(self) -> str:
        return str(self.strerror)


class PrivateFolder:
    """A folder of our own inside of `parent`, removed with all it holds by close(); also a context manager.

    Raises FolderError with the parent's path when nothing can be made there. `removed`: leftovers of earlier runs that were
    cleared away; `kept`: folders that look like ours but are not, one sentence each.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        self.parent = Path(parent)
        self._check_parent()
        self.removed, self.kept = remove_leftovers(self.parent)
        self.path = self.parent / f".lamina-nvme-{secrets.token_hex(8)}"
        self._lock = -1
        try:
            os.mkdir(self.path, 0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, MARK)
        except OSError as error:
            self.close()
            raise self._refusal(error) from error
        except BaseException:  # a signal between the calls: leave nothing behind
            self.close()
            raise

    def _check_parent(self) -> None:
        try:
            status = os.stat(self.parent)
        except OSError as error:
            raise self._refusal(error) from error
        if stat.S_ISBLK(status.st_mode):
            advice = f"give a folder of the file system on it (findmnt {self.parent}): nothing is written over it"
            raise FolderError(errno.ENOTDIR, f"{self.parent} is a disk, not a folder: {advice}")
        if not stat.S_ISDIR(status.st_mode):
            raise FolderError(errno.ENOTDIR, f"{self.parent} is not a folder: give a folder on the disk to be measured")

    def _refusal(self, error: OSError) -> FolderError:
        hint = "give a folder that can be written"
        if isinstance(error, FileNotFoundError) and not self.parent.exists():
            hint = "make it first (mkdir -p), on the disk to be measured"
        elif isinstance(error, PermissionError):
            hint = f"give a folder that user {os.geteuid()} may write"
        text = f"cannot work in {self.parent}: {error.strerror}; {hint}"
        return FolderError(error.errno or errno.EIO, text)

    def data_file(self, kind: str, *numbers: int) -> Path:
        """Path of a data file: only such names are removed."""
        name = f"{kind}-{'-'.join(map(str, numbers))}.bin"
        if not _DATA.fullmatch(name):
            raise ValueError(f"{name} is no name of a data file")
        return self.path / name

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if self.path.exists():
            _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_leftovers(parent: Path) -> tuple[list[str], list[str]]:
    """Clear away what killed runs left in `parent`: (folders removed, sentences about folders that were left)."""
    removed, kept = [], []
    for folder in _candidates(parent):
        reason = _why_not_ours(folder)
        if reason == "in use":
            continue  # another run, alive
        if reason:
            kept.append(f"{folder} is left alone: {reason}")
            continue
        _remove(folder)
        removed.append(str(folder))
    return removed, kept


def _candidates(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(PermissionError), os.scandir(parent) as entries:
        for entry in entries:
            if _FOLDER.fullmatch(entry.name):
                yield Path(entry.path)


def _why_not_ours(folder: Path) -> str:
    """Empty when `folder` is the leftover of a run of ours that has ended."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) != 0o700:
        return f"its mode is {stat.S_IMODE(status.st_mode):o}, ours have 700"
    strangers = [name for name in os.listdir(folder) if name != LOCK and not _DATA.fullmatch(name)]
    if strangers:
        return f"it holds {strangers[0]!r}, which is not ours"
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed between mkdir and the lock, or not ours. Empty, it holds nothing that could be lost.
        return "" if not os.listdir(folder) and _is_old(status) else "in use"
    except OSError as error:
        return f"its {LOCK} cannot be read ({error.strerror})"
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark = os.pread(fd, len(MARK) + 1, 0)
    except BlockingIOError:
        return "in use"
    finally:
        os.close(fd)
    # An empty mark is that of a run killed before it wrote it, which has no data either.
    return "" if mark in (MARK, b"") else f"its {LOCK} was not written by lamina"


def _is_old(status: os.stat_result) -> bool:
    """Whether a folder was made long enough ago that its maker is not just about to lock it."""
    return os.stat("/proc/self").st_ctime - status.st_mtime > 60


def _remove(folder: Path) -> None:
    """Remove the files that have our names, the lock last, then the folder; what else is in it stays, and so it does."""
    names = sorted(os.listdir(folder), key=lambda name: name == LOCK)
    for name in names:
        if name == LOCK or _DATA.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)
    with contextlib.suppress(OSError):
        os.rmdir(folder)

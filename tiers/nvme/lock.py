"""One owner per rank folder: flock on a file that says who it is."""

import fcntl
import json
import os
import socket
import weakref

from lamina.tiers.errors import LockedError, StoreError

from .folder import RankFolder

LOCK_NAME = "lock"


def file_device(folder: RankFolder) -> int:
    """st_dev of the files in a folder that is locked: on overlay file systems the folder itself has another. Raises OSError."""
    return os.stat(folder.file(LOCK_NAME), follow_symlinks=False).st_dev


def process_exists(pid: int) -> bool:
    """Whether a process with this id runs on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _owner(fd: int) -> tuple[int | None, str | None]:
    """(pid, host) written in a lock file; (None, None) when it is empty or says something else."""
    try:
        data = json.loads(os.pread(fd, 4096, 0) or b"{}")
        pid, host = data.get("pid"), data.get("host")
    except (ValueError, AttributeError):
        return None, None
    return (pid if type(pid) is int else None), (host if isinstance(host, str) else None)


def _close_in_child(lock: "weakref.ref[FolderLock]") -> None:
    held = lock()
    if held is not None:
        held.forget()


class FolderLock:
    """The lock of one folder, held until release().

    takeover: a sentence when the folder was left locked by a process that is gone, else None. A forked child
    lets go of its copy, so that workers which outlive their parent do not keep the folder locked.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, LOCK_NAME)
        self.takeover: str | None = None
        self._fd = self._acquire(folder)
        pid, host = _owner(self._fd)
        if pid is not None:
            self.takeover = f"took over the stale lock of pid {pid} on host {host}, which ended without closing"
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            self.forget()
            raise StoreError(f"cannot write the lock {self.path}: {error.strerror}. Free space on its disk") from error
        # [Note: locks and fork] flock belongs to the open file, which fork() shares: a data loader's worker
        # that outlives a killed trainer would hold the lock. Closing the child's copy does not unlock the
        # parent's.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(reference))

    def _acquire(self, folder: str) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise StoreError(f"cannot open the lock {self.path}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, host = _owner(fd)
                os.close(fd)
                raise self._refusal(folder, pid, host) from None
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False)):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)  # its owner removed the folder between our open and our lock: start again

    @staticmethod
    def _refusal(folder: str, pid: int | None, host: str | None) -> LockedError:
        who = f"pid {pid} on host {host}" if pid is not None else "a process that has not yet said who it is"
        if pid == os.getpid() and host == socket.gethostname():
            who += " (this process)"
        elif pid is not None and host == socket.gethostname() and not process_exists(pid):
            who += " (gone, but a process it started still holds the lock)"
        return LockedError(
            f"{folder} is in use by {who}. Give this job another name or another path in tiers.nvme, or end the owner",
            pid=pid,
            host=host,
        )

    @property
    def held(self) -> bool:
        """Whether this process holds the lock through this object."""
        return self._fd >= 0

    def forget(self) -> None:
        """Close without saying that the owner is done (for a forked child)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def release(self, *, remove: bool = False) -> None:
        """Say that the owner is done and unlock; remove deletes the lock file. Harmless when repeated."""
        if self._fd < 0:
            return
        os.ftruncate(self._fd, 0)
        if remove:
            os.unlink(self.path)
        self.forget()

"""The rank folder on one path: made private, never through a symlink, emptied of nothing but its own."""

import getpass
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lamina.tiers.errors import StoreError

_MAX_NAME = 200
SYNC_THREADS = 8


def user_name() -> str:
    """Who this process runs as, for messages."""
    try:
        return f"{getpass.getuser()} (uid {os.geteuid()})"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"


def check_job(job: str) -> None:
    """Raise ValueError unless the job's name is one safe path component."""
    if not job or job.startswith(".") or "/" in job or "\0" in job or len(os.fsencode(job)) > _MAX_NAME:
        raise ValueError(
            f"job name {job!r}: must be a file name of 1 to {_MAX_NAME} bytes, without '/', not starting with '.'"
        )


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    _sync(path, os.O_DIRECTORY)


def sync_file(path: str) -> None:
    """Make a file of ours durable."""
    _sync(path, os.O_NOFOLLOW)


def sync_all(paths: Sequence[str]) -> None:
    """Make files and directories of ours durable, all at once: a file system then needs about one commit for all of them
    instead of one for each. Raises OSError for the first that failed, when all have ended."""
    if len(paths) == 1:
        _sync(paths[0], os.O_NOFOLLOW)
    elif paths:
        with ThreadPoolExecutor(max_workers=min(SYNC_THREADS, len(paths)), thread_name_prefix="lamina-sync") as pool:
            for done in [pool.submit(_sync, path, os.O_NOFOLLOW) for path in paths]:
                done.result()


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RankFolder:
    """<root>/<job>/rank<r>, created 0700. key: how the configuration calls the root, for messages.

    notes: sentences about what was done to it. Raises StoreError naming key, path, user and what to do.
    """

    def __init__(self, root: str, *, job: str, rank: int, key: str) -> None:
        check_job(job)
        if rank < 0:
            raise ValueError(f"rank is {rank}, must not be negative")
        self.key = key
        self.root = os.path.abspath(root)
        self.job_path = os.path.join(self.root, job)
        self.path = os.path.join(self.job_path, f"rank{rank}")
        self.notes: list[str] = []
        self._created: list[str] = []
        try:
            self._make_root()
            self._make_private(self.job_path)
            self._make_private(self.path)
        except BaseException:
            self.remove_created()
            raise

    def _refusal(self, path: str, why: str, step: str) -> StoreError:
        return StoreError(f"{self.key} = {self.root!r}: {path} {why} (user {user_name()}). {step}")

    def _make_root(self) -> None:
        missing: list[str] = []
        path = self.root
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        step = "Name a directory that this user can write, or change its owner or mode"
        for path in reversed(missing):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise self._refusal(path, f"cannot be created: {error.strerror}", step) from error
            sync_directory(os.path.dirname(path))
            self._created.append(path)
            self.notes.append(f"created {path}")
        if not os.path.isdir(self.root):
            raise self._refusal(self.root, "is not a directory", "Name a directory on the disk to be used")
        if not os.access(self.root, os.W_OK | os.X_OK, effective_ids=True):
            raise self._refusal(self.root, "cannot be written", step)

    def _make_private(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
            sync_directory(os.path.dirname(path))
            self._created.append(path)
            return
        except FileExistsError:
            pass
        except OSError as error:
            step = "Name a directory that this user can write, or change its owner or mode"
            raise self._refusal(path, f"cannot be created: {error.strerror}", step) from error
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise self._refusal(path, "is a symbolic link, which is not followed", "Remove it or use another job name")
        if not stat.S_ISDIR(found.st_mode):
            raise self._refusal(path, "is not a directory", "Move it away or use another job name")
        if found.st_uid != os.geteuid():
            raise self._refusal(path, f"belongs to uid {found.st_uid}", "Use another job name")
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.chmod(path, 0o700)
            self.notes.append(f"{path} was open to others (mode {stat.S_IMODE(found.st_mode):o}): set to 700")

    def file(self, name: str) -> str:
        """Path of one of our files. Raises StoreError for anything but a plain name or where a symlink
        lies."""
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise StoreError(f"{self.path}: {name!r} is not a plain file name")
        path = os.path.join(self.path, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link, which is not followed" if stat.S_ISLNK(found.st_mode) else "not a regular file"
            raise StoreError(f"{path} is {kind}. Move it away or use another job name")
        return path

    def free_bytes(self) -> int:
        """What this user may still write on the file system, in bytes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def remove(self, names: Iterable[str]) -> None:
        """Delete these files of ours; missing ones are no matter."""
        for name in names:
            try:
                os.unlink(self.file(name))
            except FileNotFoundError:
                continue

    def remove_created(self) -> None:
        """Delete the directories that this object created, as far as they are empty."""
        for path in reversed(self._created):
            try:
                os.rmdir(path)
            except OSError:
                return

    def remove_empty(self) -> None:
        """Delete rank and job folder, and what this object created above them, as far as they are empty."""
        above = [path for path in self._created if path not in (self.path, self.job_path)]
        for path in [self.path, self.job_path, *reversed(above)]:
            try:
                os.rmdir(path)
            except OSError:
                return

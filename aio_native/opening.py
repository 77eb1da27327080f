"""Opening a file for direct I/O: creation, preallocation, and finding out by doing what the file system can."""

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass

from .errors import AsyncIOError, errno_name
from .native import load_threads

FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
}
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Descriptors of an open file and what was found about it."""

    fd: int
    buffered_fd: int
    """The same file without O_DIRECT, or -1."""
    direct: bool
    offset_align: int
    """Bytes; 1 when not direct."""
    memory_align: int
    """Bytes; 1 when not direct."""
    device: int
    """st_dev of the file, st_rdev of a block device."""
    file_system: str
    reason: str
    """Why it is direct or not."""
    preallocated: bool
    preallocation_note: str

    def close(self) -> None:
        os.close(self.fd)
        if self.buffered_fd >= 0:
            os.close(self.buffered_fd)


def file_system_name(fd: int) -> str:
    native = load_threads()
    number = native.ffi.new("uint64_t *")
    if native.lib.lamina_probe_file_system(fd, number):
        return "unknown"
    return FILE_SYSTEMS.get(number[0], f"file system {number[0]:#x}")


def _failure(error: OSError, path: str, what: str) -> AsyncIOError:
    number = error.errno or errno.EIO
    return AsyncIOError(number, f"cannot {what} {path}: {errno_name(number)}", path=path)


def _open_plain(path: str, *, writable: bool, create: bool, exclusive: bool) -> tuple[int, bool]:
    """(descriptor, whether the file was made just now). Never waits for a FIFO's other end."""
    flags = (os.O_RDWR if writable or create else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    if not create:
        return os.open(path, flags), False
    flags |= os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        if exclusive:
            raise
        return os.open(path, flags), False


def _check_kind(fd: int, path: str) -> os.stat_result:
    status = os.fstat(fd)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise AsyncIOError(errno.EINVAL, f"cannot use {path}: neither a regular file nor a block device", path=path)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    return status


def _set_size(fd: int, path: str, size: int, sparse: bool) -> tuple[bool, str]:
    """Gives the file exactly `size` bytes: (space is reserved, why not)."""
    before = os.fstat(fd).st_size
    note = "sparse, as asked" if sparse else ""
    if size and not sparse:
        rc = -load_threads().lib.lamina_preallocate(fd, size)
        if rc in (errno.EOPNOTSUPP, errno.ENOSYS):
            note = f"fallocate failed with {errno_name(rc)}"
        elif rc:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
            free = os.fstatvfs(fd)
            raise AsyncIOError(
                rc,
                f"cannot reserve {size} bytes for {path}: {errno_name(rc)}; "
                f"{free.f_bavail * free.f_frsize} bytes are free on its file system",
                path=path,
                offset=0,
                wanted=size,
                got=0,
            )
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    return not note, note


def _reopen_direct(fd: int, path: str, flags: int) -> int:
    """The same file with O_DIRECT; by way of /proc, so that a file renamed meanwhile is not mixed up."""
    flags |= os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except FileNotFoundError:  # no /proc here
        direct = os.open(path, flags | os.O_NOFOLLOW)
        if not os.path.sameopenfile(fd, direct):
            os.close(direct)
            raise OSError(errno.ESTALE, "the file was replaced while it was being opened") from None
        return direct


def _go_direct(fd: int, path: str, writable: bool, file_system: str) -> tuple[int, int, int, str]:
    """(descriptor or -1, offset alignment, memory alignment, reason)."""
    if file_system in IN_MEMORY:
        return -1, 1, 1, f"{file_system} lives in memory: nothing to be direct to"
    try:
        direct = _reopen_direct(fd, path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        return -1, 1, 1, f"opening with O_DIRECT failed with {errno_name(error.errno or 0)} on {file_system}"
    native = load_threads()
    probe = native.ffi.new("struct lamina_probe *")
    rc = native.lib.lamina_probe_direct(direct, probe)
    if rc or not probe.offset_align:
        os.close(direct)
        return -1, 1, 1, f"a direct read failed with {errno_name(-rc or probe.error)} on {file_system}"
    source = "statx" if probe.told else "trial"
    return (
        direct,
        probe.offset_align,
        probe.memory_align,
        f"a direct read worked on {file_system} (alignment by {source})",
    )


def open_file(
    path: str,
    *,
    writable: bool = False,
    create: bool = False,
    exclusive: bool = False,
    size: int | None = None,
    sparse: bool = False,
    direct: bool | None = None,
) -> Opened:
    """Opens and probes. Raises AsyncIOError with errno; leaves no descriptor, and no file it has just made, behind."""
    try:
        fd, made = _open_plain(path, writable=writable, create=create, exclusive=exclusive)
    except OSError as error:
        raise _failure(error, path, "create" if create else "open") from error
    try:
        status = _check_kind(fd, path)
        preallocated, note = (False, "")
        if size is not None:
            preallocated, note = _set_size(fd, path, size, sparse)
        return _finish(fd, path, status, writable or create, direct, preallocated, note)
    except BaseException as error:
        os.close(fd)
        if made:
            os.unlink(path)
        if isinstance(error, OSError) and not isinstance(error, AsyncIOError):
            raise _failure(error, path, "set up") from error
        raise


def _finish(
    fd: int, path: str, status: os.stat_result, writable: bool, direct: bool | None, preallocated: bool, note: str
) -> Opened:
    # A device node lies in a tmpfs, which says nothing about the device.
    file_system = "a block device" if stat.S_ISBLK(status.st_mode) else file_system_name(fd)
    direct_fd, offset_align, memory_align, reason = -1, 1, 1, "buffered, as asked"
    if direct is not False:
        direct_fd, offset_align, memory_align, reason = _go_direct(fd, path, writable, file_system)
    if direct and direct_fd < 0:
        raise AsyncIOError(
            errno.EOPNOTSUPP,
            f"no direct I/O for {path}: {reason}. Use direct=None to fall back on buffered I/O",
            path=path,
        )
    if direct_fd >= 0 and not writable:
        os.close(fd)
    return Opened(
        fd=direct_fd if direct_fd >= 0 else fd,
        buffered_fd=fd if direct_fd >= 0 and writable else -1,
        direct=direct_fd >= 0,
        offset_align=offset_align,
        memory_align=memory_align,
        device=status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev,
        file_system=file_system,
        reason=reason,
        preallocated=preallocated,
        preallocation_note=note,
    )

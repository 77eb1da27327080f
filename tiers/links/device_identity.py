"""Which disk lies under a path: what a measurement of it is valid for."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """What stays the same as long as it is the same disk in the same machine; empty where the system does not tell."""

    machine: str
    """Hash of the machine's id, or of its host name where it has none."""
    file_system: str
    model: str
    serial: str
    """Serial number, world-wide name or volume id; of a network file system its source."""
    capacity_bytes: int
    """Of the disk; of the file system where no disk is under it."""

    def key(self) -> str:
        """Sixteen hexadecimal digits that name this device in file names."""
        fields = [self.machine, self.file_system, self.model, self.serial, str(self.capacity_bytes)]
        return hashlib.sha256("\0".join(fields).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        name = " ".join(part for part in (self.model, self.serial) if part) or "disk without a name"
        return f"{name}, {self.capacity_bytes / 1e9:.4g} GB, {self.file_system}"


def identify(path: str | os.PathLike[str], *, root: Path = Path("/")) -> DeviceIdentity:
    """The device that holds `path`, or its nearest parent that exists. `root`: where /proc, /sys and /etc are read.

    Raises OSError when not even a parent can be opened.
    """
    folder = existing_parent(path)
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        device = _file_device(fd)
        space = os.fstatvfs(fd)
        file_system, source = _mount(fd, root)
    finally:
        os.close(fd)
    numbers = f"{os.major(device)}:{os.minor(device)}"
    if os.major(device) == 0 and source.startswith("/dev/"):
        # btrfs gives a made-up device number: the mount's source tells the disk.
        node = os.stat(source).st_rdev if os.path.exists(source) else 0
        numbers = f"{os.major(node)}:{os.minor(node)}"
    disk = _disk_folder(numbers, root)
    if disk is None:
        return DeviceIdentity(
            machine=machine_key(root),
            file_system=file_system,
            model="",
            serial="" if source in ("", "none", file_system) else source,
            capacity_bytes=space.f_blocks * space.f_frsize,
        )
    return DeviceIdentity(
        machine=machine_key(root),
        file_system=file_system,
        model=_first(disk, "device/model") or disk.name.rstrip("0123456789"),
        serial=_first(disk, "serial", "device/serial", "wwid", "device/wwid", "dm/uuid", "md/uuid"),
        capacity_bytes=int(_first(disk, "size") or 0) * SECTOR,
    )


def _file_device(folder: int) -> int:
    """st_dev of a file in an open folder: on overlay file systems that of a layer below, and the folder's own is made up."""
    own = os.fstat(folder).st_dev
    if os.major(own) != 0:
        return own
    try:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:  # not allowed there, or no such thing on this file system
        return own
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def existing_parent(path: str | os.PathLike[str]) -> Path:
    """`path`, absolute, or the nearest folder above it that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def machine_key(root: Path = Path("/")) -> str:
    """Sixteen hexadecimal digits that name this machine; its id itself is not given away."""
    text = _first(root, "etc/machine-id", "var/lib/dbus/machine-id") or platform.node()
    return hashlib.sha256(f"lamina {text}".encode()).hexdigest()[:16]


def _first(folder: Path, *names: str) -> str:
    """The content of the first of these files that can be read and is not empty."""
    for name in names:
        try:
            text = (folder / name).read_text(errors="replace").strip()
        except OSError:
            continue
        if text:
            return text
    return ""


def _mount(fd: int, root: Path) -> tuple[str, str]:
    """(file system, source) of the mount that an open folder lies on; "unknown" when /proc does not tell."""
    lines = _first(root, f"proc/self/fdinfo/{fd}").splitlines()
    number = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), None)
    for line in _first(root, "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = right.split()
        if left.split()[0] == number and len(fields) >= 2:
            return fields[0], fields[1]
    return "unknown", ""


def _disk_folder(numbers: str, root: Path) -> Path | None:
    """Folder in sysfs of the whole disk with these device numbers, or with a partition that has them."""
    folder = root / "sys/dev/block" / numbers
    if not folder.exists():
        return None
    folder = folder.resolve()
    return folder.parent if (folder / "partition").exists() else folder

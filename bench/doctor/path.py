"""Checks of folders for state on NVMe: by writing there, directly where it can be had."""

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from lamina.aio_native import backend_report
from lamina.bench.doctor.finding import Finding, State, quiet
from lamina.bench.report import format_bytes
from lamina.tiers.links.device_identity import existing_parent, identify
from lamina.tiers.links.profile import ProfileError
from lamina.tiers.links.profile_file import load_profile

SECTION = "paths"
LITTLE_SPACE = 1 << 30
IN_MEMORY = ("tmpfs", "ramfs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse", "9p", "ceph", "lustre")


def check_path(path: Path, *, wanted_bytes: int | None = None) -> Iterator[Finding]:
    """One folder: can it be made and written, how, how much is free, and is there a profile of its disk.

    wanted_bytes: what a config asks for there.
    """
    name, quoted = str(path), shlex.quote(str(path))

    def finding(state: State, text: str, mend: str = "") -> Finding:
        return Finding(section=SECTION, name=name, state=state, text=text, mend=mend)

    folder = existing_parent(path)
    if path.is_block_device():
        yield finding(State.FAIL, "is a disk: name a folder of the file system on it", f"findmnt {quoted}")
        return
    if path.exists() and not path.is_dir():
        yield finding(State.FAIL, "is not a folder: name another", f"ls -ld {quoted}")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        what = "cannot be written" if folder == path else f"cannot be made: {folder} cannot be written"
        mend = f"sudo install -d -m 700 -o {os.geteuid()} {quoted}"
        yield finding(State.FAIL, f"{what} by user {os.geteuid()}", mend)
        return
    try:
        with quiet():
            report = backend_report(folder).path
    except OSError as error:
        yield finding(
            State.FAIL,
            f"a transfer there failed: {error}",
            f"findmnt -T {shlex.quote(str(folder))}  # and give a folder on a disk",
        )
        return
    if report is None:
        raise RuntimeError(f"no report about {folder}")
    device = identify(folder)
    made = "" if folder == path else " (does not exist yet, can be made)"
    if report.direct:
        text = f"direct I/O works, alignment {report.alignment}; {device}{made}"
        yield finding(State.WARN if device.file_system in NETWORK else State.OK, text)
    elif device.file_system in IN_MEMORY:
        text = f"lives in memory ({device.file_system}): state there takes the memory that it should spare{made}"
        yield finding(
            State.WARN, text, f"findmnt -t ext4,xfs,btrfs  # and take a folder on one of these instead of {quoted}"
        )
    else:
        text = f"no direct I/O, transfers are cached: {report.reason}; {device}{made}"
        yield finding(State.WARN, text, "use a folder on a local ext4 or xfs file system (findmnt -t ext4,xfs)")
    if not report.preallocated:
        yield finding(State.WARN, "space cannot be reserved: a full disk shows only during training")
    yield _space(name, folder, wanted_bytes)
    if device.file_system not in IN_MEMORY:
        yield _profile(name, path, quoted)


def _space(name: str, folder: Path, wanted: int | None) -> Finding:
    found = os.statvfs(folder)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    if wanted is not None and wanted > free:
        text += f", the config wants {format_bytes(wanted)}"
        return Finding(
            section=SECTION, name=name, state=State.FAIL, text=text, mend=f"free space there, or lower bytes to {free}"
        )
    state = State.WARN if free < LITTLE_SPACE else State.OK
    mend = f"du -xh --max-depth=1 {shlex.quote(str(folder))} | sort -h | tail" if state is State.WARN else ""
    return Finding(section=SECTION, name=name, state=state, text=text, mend=mend)


def _profile(name: str, path: Path, quoted: str) -> Finding:
    measure = ("" if path.exists() else f"mkdir -p {quoted} && ") + f"lamina nvme --save {quoted}"
    try:
        profile = load_profile([path])
    except ProfileError as error:
        what = str(error).split(" Run ")[0]
        text = "not measured yet" if what.startswith("no profile") else what
        return Finding(section=SECTION, name=name, state=State.INFO, text=text.rstrip("."), mend=measure)
    disk = profile.disk(path)
    days = max(0.0, (time.time() - profile.created) / 86400)
    text = f"measured {days:.0f} days ago: read {disk.read.median / 1e9:.2f}, write {disk.write.median / 1e9:.2f} GB/s"
    return Finding(section=SECTION, name=name, state=State.OK, text=text)

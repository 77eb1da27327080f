"""The machine that this process runs on, as far as files under /proc and /sys tell; rates come from a
profile.

Limits are those of the container, not of the hardware: a cgroup's memory limit on any level counts.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.quantity import GB, MIB

_UNLIMITED = 1 << 60
"""cgroup version 1 writes a page-aligned number near 2^63 where there is no limit."""


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the least of physical memory and its cgroups' limits."""
    total = _meminfo(root)
    return min([total, *_cgroup_limits(root)])


def _meminfo(root: Path) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            return int(value.split()[0]) * 1024
    raise PlanError(f"{path}: MemTotal is missing; give host=… bytes")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of this process's cgroup and of all above it, both versions."""
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return
    for line in listing.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / group.lstrip("/")
        # Inside of a container the path is seen from the host's root and may not exist: the mount itself counts.
        for level in (folder, *folder.parents):
            if level.is_relative_to(base):
                yield from _limit(level / name)


def _limit(path: Path) -> Iterator[int]:
    if not path.is_file():
        return
    text = path.read_text().strip()
    if text.isdigit() and int(text) < _UNLIMITED:
        yield int(text)


def this_machine(
    *,
    rates: Mapping[str, Any] | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    root: Path = Path("/"),
) -> Machine:
    """This machine without a GPU. ``rates``: fields of ``Machine`` that were measured; unknown rates stay
    unknown.

    ``nvme_path``: a folder whose file system's free space is the nvme tier.
    """
    space = 0
    if nvme_path is not None:
        folder = Path(nvme_path).resolve()
        while not folder.exists():
            folder = folder.parent
        found = os.statvfs(folder)
        space = found.f_bavail * found.f_frsize
    machine = Machine(
        name="this machine",
        shared_memory=True,
        devices_per_host=ranks,
        host_bytes=memory_limit(root),
        nvme_bytes=space,
        process_bytes=350 * MIB,
        host_reserve_bytes=512 * MIB,
        peer_bandwidth=2 * GB,
    )
    return machine.with_changes(rates or {})

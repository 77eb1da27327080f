"""What memory this process may take: free memory, cgroup limits (v1 and v2) and resource limits, in bytes."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lamina.tiers.errors import BudgetError

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" as a number near 2^63
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, kw_only=True)
class CgroupLimit:
    """The limit of one control group. free: limit - used, page cache that can be dropped counted as free."""

    path: str
    limit: int
    used: int
    reclaimable: int

    @property
    def free(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.limit - max(0, self.used - self.reclaimable))


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Everything that bounds this process's memory. None: no such limit."""

    total: int
    available: int
    cgroup: CgroupLimit | None
    address_space_free: int | None
    """RLIMIT_AS less what is mapped"""
    lockable: int | None
    """RLIMIT_MEMLOCK less what is locked; None for a process that may lock at will"""

    def allowance(self, *, locked: bool = False) -> tuple[int, str]:
        """(bytes that may still be taken, what says so). locked: of memory that is page-locked."""
        bounds = [(self.available, "free memory (MemAvailable)")]
        if self.cgroup is not None:
            bounds.append((self.cgroup.free, f"cgroup limit {self.cgroup.limit:,} of {self.cgroup.path}"))
        if self.address_space_free is not None:
            bounds.append((self.address_space_free, "RLIMIT_AS (ulimit -v)"))
        if locked and self.lockable is not None:
            bounds.append((self.lockable, "RLIMIT_MEMLOCK (ulimit -l)"))
        return min(bounds)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        group = self.cgroup
        return {
            "total": self.total,
            "available": self.available,
            "cgroup": None if group is None else {"path": group.path, "limit": group.limit, "used": group.used},
            "address_space_free": self.address_space_free,
            "lockable": self.lockable,
        }


def check_budget(key: str, nbytes: int, limits: MemoryLimits, *, locked: bool = False, already_held: int = 0) -> None:
    """Refuse a budget that this process cannot have. key: its name in the configuration.

    already_held: bytes of the budget that are in use now. Raises BudgetError with the numbers.
    """
    allowed, why = limits.allowance(locked=locked)
    wanted = nbytes - already_held
    if wanted <= allowed:
        return
    held = f" ({already_held:,} of it held already)" if already_held else ""
    raise BudgetError(
        f"{key} is {nbytes:,} bytes{held}, but only {allowed:,} more can be had: {why}. "
        f"{wanted - allowed:,} bytes are "
        f"too many: lower {key} to {allowed + already_held:,} or less, or raise that limit",
        owner=key,
        wanted=wanted,
        free=allowed,
        budget=nbytes,
        largest=allowed,
    )


def read_memory_limits(*, root: str = "/") -> MemoryLimits:
    """Read them for this process. root: where proc and sys are looked for (for tests). Raises OSError."""
    info = _fields(os.path.join(root, "proc/meminfo"))
    status = _fields(os.path.join(root, "proc/self/status"))
    limits = _read(os.path.join(root, "proc/self/limits"))
    groups = list(_cgroup_limits(root))
    space = _soft_limit(limits, "Max address space")
    lock = _soft_limit(limits, "Max locked memory")
    may_lock = int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    return MemoryLimits(
        total=_kilobytes(info["MemTotal"]),
        available=_kilobytes(info["MemAvailable"]),
        cgroup=min(groups, key=lambda group: group.free, default=None),
        address_space_free=None if space is None else max(0, space - _kilobytes(status.get("VmSize", "0 kB"))),
        lockable=None if lock is None or may_lock else max(0, lock - _kilobytes(status.get("VmLck", "0 kB"))),
    )


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _fields(path: str) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in _read(path).splitlines())}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _soft_limit(limits: str, name: str) -> int | None:
    match = re.search(rf"^{name}\s+(\S+)", limits, re.MULTILINE)
    return None if match is None or match[1] == "unlimited" else int(match[1])


def _cgroup_limits(root: str) -> Iterator[CgroupLimit]:
    """Limits of this process's group and of every group above it that can be seen, v1 and v2."""
    groups: dict[str, str] = {}
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    for kind, top, mount in _cgroup_mounts(root):
        if kind not in groups:
            continue
        # In a container the mount may show only a part of the tree, whose top is then `top`.
        relative = os.path.relpath(groups[kind], top) if groups[kind].startswith(top) else "."
        folder = os.path.normpath(os.path.join(mount, relative))
        if not os.path.isdir(folder):
            folder = mount
        while True:
            limit = _limit_v2(folder) if kind == "cgroup2" else _limit_v1(folder)
            if limit is not None:
                yield limit
            if folder == mount:
                break
            folder = os.path.dirname(folder)


def _cgroup_mounts(root: str) -> Iterator[tuple[str, str, str]]:
    """(cgroup or cgroup2, top of the tree that is mounted, mount point) of the mounts that may limit memory."""
    for line in _read(os.path.join(root, "proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        top, mount = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(" ")[-1].split(",")):
            yield kind, top, os.path.normpath(os.path.join(root, mount.lstrip("/")))


def _number(path: str) -> int | None:
    """The number in a one-line file; None for "max", "no limit" and a file that is not there."""
    try:
        text = _read(path).strip()
    except (FileNotFoundError, PermissionError):
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _stat(folder: str, name: str) -> int:
    try:
        text = _read(os.path.join(folder, "memory.stat"))
    except (FileNotFoundError, PermissionError):
        return 0
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _limit_v1(folder: str) -> CgroupLimit | None:
    limit = _number(os.path.join(folder, "memory.limit_in_bytes"))
    if limit is None:
        return None
    used = _number(os.path.join(folder, "memory.usage_in_bytes")) or 0
    return CgroupLimit(path=folder, limit=limit, used=used, reclaimable=_stat(folder, "total_inactive_file"))


def _limit_v2(folder: str) -> CgroupLimit | None:
    bounds = [_number(os.path.join(folder, name)) for name in ("memory.max", "memory.high")]
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return None
    used = _number(os.path.join(folder, "memory.current")) or 0
    return CgroupLimit(path=folder, limit=min(known), used=used, reclaimable=_stat(folder, "inactive_file"))

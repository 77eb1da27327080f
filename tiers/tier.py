"""Tiers, planes and shards: the words for where state lives and what it is."""

import enum
import re
from dataclasses import dataclass

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")


class Tier(enum.StrEnum):
    """A place that holds shards."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Plane(enum.StrEnum):
    """One kind of state of a shard."""

    PARAM = "param"
    REMAINDER = "remainder"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"


@dataclass(frozen=True, kw_only=True)
class PlaneSpec:
    """A plane and the bytes of one of its elements."""

    plane: Plane
    itemsize: int
    """bytes per element"""

    def __post_init__(self) -> None:
        if not 1 <= self.itemsize <= 16:
            raise ValueError(f"plane {self.plane}: itemsize is {self.itemsize} bytes, must be 1 to 16")


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """What one rank keeps of one param group.

    numel: elements of every plane. frozen: written once, never part of a later generation.
    """

    name: str
    numel: int
    planes: tuple[PlaneSpec, ...]
    frozen: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"shard name {self.name!r}: must be 1 to 1000 printable characters")
        if self.numel < 0:
            raise ValueError(f"shard {self.name}: numel is {self.numel}, must not be negative")
        kinds = [spec.plane for spec in self.planes]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"shard {self.name}: a plane is listed twice: {', '.join(kinds)}")

    def plane_bytes(self, plane: Plane) -> int:
        """Bytes of one plane. Raises KeyError when the shard has no such plane."""
        for spec in self.planes:
            if spec.plane == plane:
                return self.numel * spec.itemsize
        have = ", ".join(spec.plane for spec in self.planes)
        raise KeyError(f"shard {self.name} has no plane {plane}; it has: {have}")


@dataclass(frozen=True, kw_only=True)
class NvmePath:
    """A directory on a disk that state may be kept in.

    bytes: the most this job may take there (None: what is free). weight: its share, in proportion to the
    other paths' weights (measured bandwidth, say).
    """

    path: str
    bytes: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("tiers.nvme[].path is empty: give the directory that state may be kept in")
        if self.bytes is not None and self.bytes <= 0:
            raise ValueError(f"tiers.nvme path {self.path}: bytes is {self.bytes}, must be above 0 (or left out)")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"tiers.nvme path {self.path}: weight is {self.weight}, must be above 0 and finite")

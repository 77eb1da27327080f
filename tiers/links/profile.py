"""The profile file: what `lamina nvme` measured, as the scheduler and the planner use it.

Written as JSON, one file for each set of disks, named after their identities. A profile of another disk or machine, of
another layout or too old is refused: better no figures than wrong ones.
"""

import math
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .device_identity import DeviceIdentity, existing_parent, identify
from .probe import DiskSpeed

FORMAT = 1
"""Raised whenever a key changes its name or meaning."""
MAX_AGE_S = 90 * 86400.0
CLOCK_SLACK_S = 86400.0
FULL_DUPLEX_GAIN = 1.5
"""Reads and writes at once count as independent when the mix is this much faster than sharing the time would give."""


class ProfileError(ValueError):
    """A profile that cannot be used; the message says why and how to get one."""


class ForeignProfileError(ProfileError):
    """It was measured on another disk or another machine, or is laid out in another way."""


class StaleProfileError(ProfileError):
    """It was measured too long ago, or under another kernel."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Bytes per second: the median of several measurements, and the interval that likely holds the true median."""

    median: float
    low: float
    high: float
    samples: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high < math.inf or self.samples < 1:
            raise ProfileError(
                f"rate {self.low:g} <= {self.median:g} <= {self.high:g} B/s of {self.samples} measurements: "
                "must be positive, finite and in order"
            )


@dataclass(frozen=True, kw_only=True)
class DiskProfile:
    """One disk: how to reach its best rates, and what they are."""

    path: str
    """Where it was measured; for people, not a key."""
    identity: DeviceIdentity
    direct: bool
    """False: through the page cache, so the rates are those of memory."""
    page_kind: str
    """Pages of the buffers: hugetlb, thp or small."""
    backend: str
    block_bytes: int
    queue_depth: int
    num_threads: int
    files: int
    read: Rate
    write: Rate
    mixed_read: Rate
    """Share of the reads when reads and writes run at once."""
    mixed_write: Rate
    read_share: float
    """Bytes read out of all bytes of the mix."""
    read_latency_s: float
    """Mean of a piece of block_bytes at the chosen depth."""
    write_latency_s: float
    first_write: float | None
    """Bytes per second of the first write to fresh disk space."""

    def __post_init__(self) -> None:
        for name in ("block_bytes", "queue_depth", "num_threads", "files"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} is {getattr(self, name)}: must be at least 1")
        if not 0 < self.read_share < 1:
            raise ProfileError(f"read_share is {self.read_share}: must lie between 0 and 1")

    def speed(self) -> DiskSpeed:
        """As the step's lower bound takes it."""
        return DiskSpeed(read=self.read.median, write=self.write.median, direct=self.direct)

    @property
    def mix_gain(self) -> float:
        """Rate of the mix over what sharing the time between reads and writes would give; 1 for half duplex."""
        read, write = self.mixed_read.median, self.mixed_write.median
        return read / self.read.median + write / self.write.median

    @property
    def full_duplex(self) -> bool:
        """Whether reads and writes hardly slow each other down."""
        return self.mix_gain >= FULL_DUPLEX_GAIN


@dataclass(frozen=True, kw_only=True)
class Together:
    """All disks of the profile at once, bytes per second."""

    read: float
    write: float
    mixed_read: float
    mixed_write: float


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """What does not belong to a disk, bytes per second unless said otherwise; None where it was not measured."""

    copy: float | None = None
    """Bytes read plus bytes written by a copy in memory, all cores."""
    triad: float | None = None
    """Two streams read, one written."""
    stream: float | None = None
    """Three streams read, three written: the shape of Adam."""
    adam: float | None = None
    """Bytes of the planes that the fp32 Adam kernel reads and writes."""
    adam_elements: float | None = None
    """Elements per second of the same."""
    host_to_device: float | None = None
    device_to_host: float | None = None
    both_ways: float | None = None
    """Sum of both directions at once."""
    all_gather: float | None = None
    """Bytes that one of two processes on this machine receives."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ProfileError(f"{name} is {value}: must be positive and finite, or null")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one run of `lamina nvme` found."""

    format: int = FORMAT
    created: float
    """Unix time."""
    kernel: str = field(default_factory=platform.release)
    processor: str
    cores: int
    disks: tuple[DiskProfile, ...]
    together: Together | None = None
    """None with a single disk."""
    machine: MachineRates = MachineRates()

    def __post_init__(self) -> None:
        if not self.disks:
            raise ProfileError("disks is empty: a profile describes at least one disk")

    @property
    def identities(self) -> tuple[DeviceIdentity, ...]:
        return tuple(disk.identity for disk in self.disks)

    def disk(self, path: str | os.PathLike[str]) -> DiskProfile:
        """The disk that holds `path`. Raises ForeignProfileError when it is none of these."""
        wanted = identify(path)
        for disk in self.disks:
            if disk.identity == wanted:
                return disk
        known = "; ".join(str(identity) for identity in self.identities)
        raise ForeignProfileError(f"{path} lies on {wanted}; this profile has {known}. Run `{remeasure([path])}`")

    def planner_rates(self) -> dict[str, float | bool | int]:
        """Fields of the planner's machine; rates that were not measured are left out.

        Disks that lie under several of the measured paths count once.
        """
        different = {disk.identity: disk for disk in self.disks}.values()
        read, write = (sum(getattr(disk, name).median for disk in different) for name in ("read", "write"))
        if self.together is not None:
            read, write = self.together.read, self.together.write
        rates: dict[str, float | bool | int] = {
            "nvme_read_bandwidth": read,
            "nvme_write_bandwidth": write,
            "nvme_full_duplex": all(disk.full_duplex for disk in different),
            "drives": len(different),
        }
        links = [rate for rate in (self.machine.host_to_device, self.machine.device_to_host) if rate is not None]
        others = {
            "host_bandwidth": self.machine.stream or self.machine.triad or self.machine.copy,
            "link_bandwidth": min(links) if links else None,
            "peer_bandwidth": self.machine.all_gather,
        }
        return rates | {name: rate for name, rate in others.items() if rate is not None}


def remeasure(paths: Sequence[str | os.PathLike[str]]) -> str:
    """The command that makes a new profile."""
    return "lamina nvme --save " + " ".join(shlex.quote(os.fspath(path)) for path in paths)


def check_profile(
    profile: Profile,
    identities: Mapping[str, DeviceIdentity],
    *,
    now: float,
    kernel: str,
    max_age_s: float = MAX_AGE_S,
    source: str = "the profile",
) -> None:
    """Refuse a profile that does not describe the disks under these paths today.

    Raises ForeignProfileError or StaleProfileError with the field that differs, both values and the command to run.
    """
    again = f"Run `{remeasure(list(identities))}`"
    for path, identity in identities.items():
        if identity not in profile.identities:
            nearest = max(profile.identities, key=lambda other: _likeness(other, identity))
            raise ForeignProfileError(
                f"{source} is of another device than {path}: {_difference(nearest, identity)}. {again}"
            )
    age = now - profile.created
    if age > max_age_s:
        raise StaleProfileError(f"{source} is {age / 86400:.0f} days old, {max_age_s / 86400:.0f} at most. {again}")
    if age < -CLOCK_SLACK_S:
        raise StaleProfileError(f"{source} is dated {-age / 86400:.0f} days in the future: a clock was wrong. {again}")
    if profile.kernel != kernel:
        raise StaleProfileError(f"{source} was measured under Linux {profile.kernel}, this is {kernel}. {again}")


def _likeness(one: DeviceIdentity, other: DeviceIdentity) -> int:
    return sum(getattr(one, name) == getattr(other, name) for name in one.__dataclass_fields__)


def _difference(measured: DeviceIdentity, present: DeviceIdentity) -> str:
    parts = [
        f"{name} was {getattr(measured, name)!r}, is {getattr(present, name)!r}"
        for name in measured.__dataclass_fields__
        if getattr(measured, name) != getattr(present, name)
    ]
    return ", ".join(parts)


def identities_of(paths: Sequence[str | os.PathLike[str]]) -> dict[str, DeviceIdentity]:
    """The device under each path."""
    return {str(path): identify(existing_parent(path)) for path in paths}


def this_kernel() -> str:
    """The release that a profile must have been measured under."""
    return platform.release()


def today() -> float:
    """Unix time, as `created` counts it."""
    return time.time()

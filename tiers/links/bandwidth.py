"""How fast links are: bandwidth against request size, direction, mix and number of users; pure, over plain data.

A model starts from a profile or a probe and is corrected by what was measured while training. Sizes in bytes, times in
seconds, rates in bytes per second.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .correction import Corrections, Measured, Spell, Work
from .device_identity import DeviceIdentity
from .mix import mixed_seconds
from .probe import DiskSpeed
from .profile import DiskProfile, Profile

DISK = "nvme"
TO_DEVICE = "host->device"
TO_HOST = "device->host"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rate of one direction against request size.

    ``points``: (request bytes, rate), sizes rising. Between two points the rate is interpolated over the logarithm of
    the size; outside, that of the nearest one holds. ``latency_s``: until the first byte of a transfer that finds the link idle.
    """

    points: tuple[tuple[int, float], ...]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"request sizes {sizes} of a curve: want at least one, positive and rising")
        if not all(0 < rate < math.inf for _, rate in self.points) or not 0 <= self.latency_s < math.inf:
            raise ValueError(f"rates of {self.points}, latency {self.latency_s}: must be positive and finite")

    @classmethod
    def flat(cls, rate: float, *, latency_s: float = 0.0) -> "Curve":
        """The same rate at every size."""
        return cls(points=((1, rate),), latency_s=latency_s)

    def rate(self, request_bytes: int | None = None) -> float:
        """Bytes per second of requests of this size; None: of the largest that was measured."""
        sizes = [size for size, _ in self.points]
        if request_bytes is None or request_bytes >= sizes[-1]:
            return self.points[-1][1]
        at = bisect_left(sizes, request_bytes)
        if at == 0:
            return self.points[0][1]
        (low, slow), (high, fast) = self.points[at - 1], self.points[at]
        share = math.log(max(request_bytes, 1) / low) / math.log(high / low)
        return slow + share * (fast - slow)

    def scaled(self, factor: float) -> "Curve":
        """All rates times ``factor``."""
        return replace(self, points=tuple((size, rate * factor) for size, rate in self.points))


@dataclass(frozen=True, kw_only=True)
class Link:
    """One physical way, both directions.

    ``mix_gain``: how many seconds of pure transfers one second of a read-and-write mix does; 1 is half duplex (times add
    up), 2 full duplex. ``sharers``: ranks that use it at once. ``sharing_loss``: share of the rate that each further
    user costs all of them together. ``inflight_bytes``: the most that is under way at once.
    """

    name: str
    read: Curve
    write: Curve
    mix_gain: float = 1.0
    sharers: int = 1
    sharing_loss: float = 0.0
    inflight_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.mix_gain <= 2:
            raise ValueError(f"mix_gain {self.mix_gain} of {self.name}: 1 is half duplex, 2 full duplex")
        if self.sharers < 1 or not 0 <= self.sharing_loss < 1:
            raise ValueError(f"{self.sharers} sharers of {self.name}, loss {self.sharing_loss}: want >= 1 and [0, 1)")

    @property
    def share(self) -> float:
        """Part of the link's rate that one of its users gets while all of them use it."""
        return 1 / (self.sharers * (1 + self.sharing_loss * (self.sharers - 1)))

    def read_s(self, nbytes: float, request_bytes: int | None = None) -> float:
        """Time of a read that has its share of the link for itself."""
        return nbytes / (self.read.rate(request_bytes) * self.share)

    def write_s(self, nbytes: float, request_bytes: int | None = None) -> float:
        """Time of a write that has its share of the link for itself."""
        return nbytes / (self.write.rate(request_bytes) * self.share)

    def seconds(self, read_bytes: float, written_bytes: float, request_bytes: int | None = None) -> float:
        """Time of both, mixed as far as the shorter of them reaches; without latency."""
        return mixed_seconds(
            self.read_s(read_bytes, request_bytes), self.write_s(written_bytes, request_bytes), self.mix_gain
        )

    def slower(self, reading: float, writing: float) -> "Link":
        """The same link, reading and writing so many times slower."""
        return replace(self, read=self.read.scaled(1 / reading), write=self.write.scaled(1 / writing))


class BandwidthModel:
    """All links, as modelled and as corrected by measurements.

    ``link(name)`` gives the corrected link. ``observe`` takes a step's measurements and says whether any link now counts
    as faster or slower than before: a reason to plan anew.
    """

    MINIMUM_BYTES = 4 << 20
    """A step that moves less over a link says nothing about its rate."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._links = {link.name: link for link in links}
        self._corrections = {name: Corrections() for name in self._links}

    @classmethod
    def from_speeds(cls, disks: Sequence[DiskSpeed], **changes: object) -> "BandwidthModel":
        """From a probe of each path. Bytes are striped evenly over the paths, so the slowest decides."""
        return cls([disk_link(disks, (), **changes)] if disks else [])

    @classmethod
    def from_profile(
        cls, profile: Profile, *, sharers: int = 1, shares: Mapping[DeviceIdentity, float] | None = None
    ) -> "BandwidthModel":
        """From what ``lamina nvme`` measured: striped over its disks, evenly or in these shares (of those that are used);
        links to a device where it has them."""
        used = (disk for disk in profile.disks if shares is None or disk.identity in shares)
        different = list({disk.identity: disk for disk in used}.values())
        striped = [] if shares is None else [shares[disk.identity] for disk in different]
        disk = disk_link([disk.speed() for disk in different], striped, sharers=sharers)
        gain = min(2.0, max(1.0, min(disk.mix_gain for disk in different)))
        links = [
            replace(
                disk,
                read=replace(disk.read, latency_s=max(_first_byte_s(item, "read") for item in different)),
                write=replace(disk.write, latency_s=max(_first_byte_s(item, "write") for item in different)),
                mix_gain=gain,
                inflight_bytes=sum(item.block_bytes * item.queue_depth for item in different),
            )
        ]
        up, down = profile.machine.host_to_device, profile.machine.device_to_host
        if up and down:
            both = profile.machine.both_ways
            duplex = 2.0 if both is None else min(2.0, max(1.0, both / max(up, down)))
            links.append(Link(name=TO_DEVICE, read=Curve.flat(up), write=Curve.flat(down), mix_gain=duplex))
        return cls(links)

    @property
    def names(self) -> list[str]:
        """Links in the order in which they were given."""
        return list(self._links)

    def link(self, name: str) -> Link:
        """The link as corrected by now. Raises KeyError that lists what there is."""
        if name not in self._links:
            raise KeyError(f"no link {name!r}; there are: {', '.join(self._links) or 'none'}")
        return self._links[name].slower(*self._corrections[name].factors)

    def faster(self, name: str, times: float) -> "BandwidthModel":
        """Another model in which one link is so many times as fast, both ways."""
        links = [self.link(other) for other in self._links]
        return BandwidthModel(link.slower(1 / times, 1 / times) if link.name == name else link for link in links)

    def as_measured(self) -> "BandwidthModel":
        """Another model with the rates of the last few steps as they were, without the hysteresis that planning wants."""
        return BandwidthModel(link.slower(*self._corrections[name].latest) for name, link in self._links.items())

    def factors(self, name: str) -> tuple[float, float]:
        """How many times slower than first modelled the link counts as: its reads, its writes."""
        return self._corrections[name].factors

    def factor(self, name: str) -> float:
        """The same of both together, in the proportion in which they were measured last."""
        return self._corrections[name].factor

    def observe(self, measured: Measured) -> bool:
        """Take the measurement of one step; True when the link's rates changed."""
        link = self._links.get(measured.link)
        if link is None or measured.read_bytes + measured.written_bytes < self.MINIMUM_BYTES or measured.busy_s <= 0:
            return False
        return self._corrections[link.name].observe(_work(link, measured))

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Plain data: each link's corrected rates."""
        return {
            name: {
                "read": self.link(name).read.rate(),
                "write": self.link(name).write.rate(),
                "mix_gain": self.link(name).mix_gain,
                "correction": self.factor(name),
            }
            for name in self._links
        }


def _work(link: Link, measured: Measured) -> Work:
    """A measurement beside what the link was modelled to take."""
    reads, writes = measured.reads_alone, measured.writes_alone
    read_blur_s, write_blur_s = link.read_s(link.inflight_bytes), link.write_s(link.inflight_bytes)
    return Work(
        reads=Spell(seconds=reads.seconds, read_s=link.read_s(reads.nbytes), blur_s=read_blur_s),
        writes=Spell(seconds=writes.seconds, write_s=link.write_s(writes.nbytes), blur_s=write_blur_s),
        both=Spell(
            seconds=max(0.0, measured.busy_s - reads.seconds - writes.seconds),
            read_s=link.read_s(measured.read_bytes - reads.nbytes),
            write_s=link.write_s(measured.written_bytes - writes.nbytes),
            blur_s=(read_blur_s + write_blur_s) / 2,
        ),
        mix_gain=link.mix_gain,
    )


def disk_link(disks: Sequence[DiskSpeed], shares: Sequence[float] = (), **changes: object) -> Link:
    """Several disks as one link: every byte range is striped over them, evenly or in these shares (above 0, their sum is 1).
    Raises ValueError without any disk."""
    if not disks:
        raise ValueError("no disk was measured: give at least one")
    striped = list(zip(disks, shares or [1 / len(disks)] * len(disks), strict=True))
    values: dict[str, object] = {
        "name": DISK,
        "read": Curve.flat(min(disk.read / share for disk, share in striped)),
        "write": Curve.flat(min(disk.write / share for disk, share in striped)),
    }
    return Link(**(values | changes))  # type: ignore[arg-type]


def _first_byte_s(disk: DiskProfile, direction: str) -> float:
    """Latency of a piece that does not wait for the others: the mean at the chosen depth counts all of them."""
    mean = disk.read_latency_s if direction == "read" else disk.write_latency_s
    return max(0.0, mean / disk.queue_depth)

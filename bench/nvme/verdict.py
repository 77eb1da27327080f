"""What the measurements say: medians with intervals, the best points, and what makes figures doubtful. Pure."""

import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .points import Measured, Point, Workload

CONFIDENCE = 0.95
TIE = 0.02
"""Points this close to the best are as good; the one with the least in flight is recommended."""
NOISY_SPREAD = 0.10
DRIFT = 0.15
"""A fall from the first to the last third that counts as throttling."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Repeated measurements of one thing, bytes per second."""

    median: float
    low: float
    high: float
    """The interval from low to high holds the true median with probability `sure`."""
    sure: float
    samples: int

    @property
    def spread(self) -> float:
        """Width of the interval over the median."""
        return (self.high - self.low) / self.median if self.median else math.inf


def summarise(values: Iterable[float]) -> Summary:
    """Median and the narrowest interval between order statistics that reaches CONFIDENCE; the whole range if none does.

    Distribution-free: the number of samples under the true median is binomial.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("no measurement to summarise")
    cut = 0
    while 2 * (cut + 1) < count and coverage(count, cut + 1) >= CONFIDENCE:
        cut += 1
    return Summary(
        median=statistics.median(ordered),
        low=ordered[cut],
        high=ordered[count - 1 - cut],
        sure=coverage(count, cut),
        samples=count,
    )


def coverage(count: int, cut: int) -> float:
    """Probability that the median lies between the samples at `cut` from either end of `count` sorted ones."""
    return 1 - 2 * sum(math.comb(count, k) for k in range(cut + 1)) * 0.5**count


@dataclass(frozen=True, kw_only=True)
class Best:
    """The outcome of the search for one workload."""

    workload: Workload
    point: Point
    rate: Summary
    read: float
    write: float
    """Medians of the two directions."""
    latency_s: float
    rivals: tuple[Point, ...]
    """Other points whose intervals overlap the best one's: they may be as good."""

    @property
    def certainty(self) -> str:
        """How sure the figure is, in words."""
        rate = self.rate
        if rate.samples == 1:
            return "measured once"
        return f"{rate.low / 1e9:.2f} to {rate.high / 1e9:.2f}, {rate.sure:.0%} sure (n={rate.samples})"


def by_point(results: Iterable[Measured], workload: Workload) -> dict[Point, list[Measured]]:
    """The results of one workload, grouped by point, in the order measured."""
    groups: dict[Point, list[Measured]] = {}
    for result in results:
        if result.trial.workload is workload:
            groups.setdefault(result.trial.point, []).append(result)
    return groups


def score(results: Sequence[Measured]) -> float:
    """What points are compared by: the median rate."""
    return statistics.median(result.rate for result in results)


def best(results: Sequence[Measured], workload: Workload) -> Best | None:
    """The point with the highest median among those measured most often; None without a result.

    A point that was measured only once can be lucky: once repeats exist, only repeated points count.
    """
    groups = by_point(results, workload)
    if not groups:
        return None
    most = max(map(len, groups.values()))
    repeated = {point: group for point, group in groups.items() if len(group) >= min(3, most)}
    point = max(repeated, key=lambda key: score(repeated[key]))
    group = repeated[point]
    rate = summarise(result.rate for result in group)
    rivals = [
        other
        for other, measured in groups.items()
        if other != point and summarise(result.rate for result in measured).high >= rate.low
    ]
    return Best(
        workload=workload,
        point=point,
        rate=rate,
        read=statistics.median(result.read for result in group),
        write=statistics.median(result.write for result in group),
        latency_s=statistics.median(result.latency_s for result in group),
        rivals=tuple(sorted(rivals)),
    )


def recommend(results: Sequence[Measured], workloads: Sequence[Workload]) -> Point | None:
    """One point for all workloads: the best worst share of each workload's best rate; among ties the least in
    flight, then uring, which takes less CPU time.

    None when no point was measured under every workload.
    """
    groups = {workload: by_point(results, workload) for workload in workloads}
    if not all(groups.values()):
        return None
    top = {workload: max(map(score, found.values())) for workload, found in groups.items()}
    common = set.intersection(*(set(found) for found in groups.values()))
    shares = {point: min(score(groups[workload][point]) / top[workload] for workload in workloads) for point in common}
    if not shares:
        return None
    limit = max(shares.values()) * (1 - TIE)
    good = [point for point, share in shares.items() if share >= limit]
    return min(
        good, key=lambda point: (point.files, point.inflight_bytes, point.backend != "uring", -shares[point], point)
    )


class Doubt(enum.StrEnum):
    """What can be wrong with a figure."""

    CACHED = "cached"
    THROTTLED = "throttled"
    NOISY = "noisy"


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A doubt and what it rests on."""

    doubt: Doubt
    text: str


def doubts(
    found: Mapping[Workload, Best],
    results: Sequence[Measured],
    *,
    path: str,
    direct: bool,
    reason: str = "",
    copy_rate: float | None = None,
    small_region_gain: float | None = None,
) -> list[Warned]:
    """Warnings about one path's figures.

    copy_rate: bytes per second of a copy in memory (read plus written). small_region_gain: rate of reading a small part
    of the file over and over, over the rate of reading all of it.
    """
    warned = []
    if not direct:
        warned.append(
            Warned(
                doubt=Doubt.CACHED,
                text=f"{path}: figures are of the page cache, not of a disk ({reason or 'no direct I/O there'})",
            )
        )
    read = found.get(Workload.READ)
    if direct and read is not None and copy_rate is not None and read.rate.median > copy_rate:
        warned.append(
            Warned(
                doubt=Doubt.CACHED,
                text=f"{path}: reads at {read.rate.median / 1e9:.1f} GB/s are more than a memory copy's "
                f"{copy_rate / 1e9:.1f}: a cache answers (of the hypervisor, or of the controller)",
            )
        )
    if direct and small_region_gain is not None and small_region_gain > 1.3:
        warned.append(
            Warned(
                doubt=Doubt.CACHED,
                text=f"{path}: a small part of the file is read {small_region_gain:.1f} times as fast as all of it: "
                "a cache below the file system answers; a larger --size shows the disk",
            )
        )
    for best_one in found.values():
        warned += _doubts_of_one(best_one, by_point(results, best_one.workload)[best_one.point], path)
    return warned


def _doubts_of_one(best_one: Best, group: Sequence[Measured], path: str) -> list[Warned]:
    warned = []
    rates = [result.rate for result in group]
    name = f"{path}: {best_one.workload} at {best_one.point}"
    lost = drift(rates)
    if lost > DRIFT:
        warned.append(
            Warned(
                doubt=Doubt.THROTTLED,
                text=f"{name} fell by {lost:.0%} from the first third of its repeats to the last: throttled (heat, burst "
                "credit, a full write cache) or disturbed; run it longer",
            )
        )
    if best_one.rate.samples >= 3 and best_one.rate.spread > NOISY_SPREAD:
        warned.append(
            Warned(
                doubt=Doubt.NOISY,
                text=f"{name} varies by {best_one.rate.spread:.0%} between repeats: other load on this disk or machine; "
                "give more --seconds, or a quieter time",
            )
        )
    return warned


def drift(values: Sequence[float]) -> float:
    """Share lost from the first third of the values to the last, by medians; 0 when they rose or are fewer than six."""
    third = len(values) // 3
    if third < 2:
        return 0.0
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return max(0.0, 1 - last / first) if first else 0.0

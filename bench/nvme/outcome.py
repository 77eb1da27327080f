"""Everything that a run found, as plain data."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lamina.tiers.links.device_identity import DeviceIdentity

from .measure import Created
from .points import Measured, Point, Workload
from .verdict import Best, Summary, Warned


@dataclass(frozen=True, kw_only=True)
class PageEffect:
    """Rates of one workload with huge and with small pages, measured in turn, bytes per second."""

    huge: Summary
    small: Summary

    @property
    def gain(self) -> float:
        """How many times as fast huge pages are."""
        return self.huge.median / self.small.median


@dataclass(frozen=True, kw_only=True)
class FioPair:
    """Our best against the best that fio reached over the same points, measured in turn, bytes per second."""

    workload: Workload
    point: Point
    fio_point: Point
    ours: tuple[float, ...]
    """At our best point."""
    fio: tuple[float, ...]
    """At fio's best point."""
    same: tuple[float, ...]
    """Ours at fio's best point: with other load on the disk, a deeper queue gets more of it, and only this is fair."""
    fio_page_kind: str
    grid: Mapping[Point, float]
    """fio's rate at each point that it was tried on."""

    @property
    def ratio(self) -> float:
        """Our best over fio's best: the median of the ratios of neighbouring measurements."""
        return statistics.median(mine / other for mine, other in zip(self.ours, self.fio, strict=True))

    @property
    def same_ratio(self) -> float:
        """The same with fio's settings on both sides."""
        return statistics.median(mine / other for mine, other in zip(self.same, self.fio, strict=True))


@dataclass(kw_only=True)
class PathOutcome:
    """One path. Filled in as the run goes on."""

    path: Path
    identity: DeviceIdentity
    created: Created
    page_kind: str
    file_bytes: int
    results: list[Measured] = field(default_factory=list)
    best: dict[Workload, Best] = field(default_factory=dict)
    chosen: Point | None = None
    """One point for all workloads."""
    pages: dict[Workload, PageEffect] = field(default_factory=dict)
    region_gain: float | None = None
    processes: dict[Workload, tuple[float, float]] = field(default_factory=dict)
    """(read, write) bytes per second of several processes together."""
    fio: list[FioPair] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written_bytes: int = 0

    def at_chosen(self, workload: Workload) -> list[Measured]:
        """The measurements of a workload at the chosen point."""
        return [one for one in self.results if one.trial.workload is workload and one.trial.point == self.chosen]


@dataclass(kw_only=True)
class Outcome:
    """The whole run."""

    paths: Sequence[PathOutcome]
    together: Mapping[Workload, tuple[float, float]] = field(default_factory=dict)
    """(read, write) bytes per second of all paths at once."""
    rates: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Part → why it was not measured."""
    seconds: float = 0.0

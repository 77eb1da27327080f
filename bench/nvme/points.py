"""What is measured, as plain data: workloads, points of the search, trials and their outcomes."""

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20


class Workload(enum.StrEnum):
    """Which way the bytes go."""

    READ = "read"
    WRITE = "write"
    MIX = "mix"
    """Reads and writes at once, in a fixed ratio of bytes."""


@dataclass(frozen=True, kw_only=True, order=True)
class Point:
    """One way of doing I/O."""

    backend: str
    """uring or threads."""
    block_bytes: int
    queue_depth: int
    files: int = 1
    """The bytes lie in this many files, used in turn."""

    @property
    def inflight_bytes(self) -> int:
        """Bytes with the kernel at once, at most."""
        return self.block_bytes * self.queue_depth

    def __str__(self) -> str:
        files = f" in {self.files} files" if self.files > 1 else ""
        return f"{self.backend} {format_size(self.block_bytes)} x {self.queue_depth}{files}"


def format_size(nbytes: int) -> str:
    """Binary sizes as people write them for blocks: 4K, 1M."""
    for factor, unit in ((MIB, "M"), (KIB, "K")):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


class Phase(enum.StrEnum):
    """Why a trial is made."""

    COARSE = "coarse"
    """The grid as a whole."""
    REFINE = "refine"
    """Neighbours of the best so far."""
    REPEAT = "repeat"
    """The best few again, to be sure."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement to make."""

    workload: Workload
    point: Point
    seconds: float
    """Of steady running; warming up and draining come on top."""
    phase: Phase = Phase.COARSE


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The outcome of a trial. Rates are bytes per second."""

    trial: Trial
    read: float
    write: float
    latency_s: float = 0.0
    """Mean time of one piece."""
    cost_s: float
    """Wall time that the trial took in all."""
    depth: float = 0.0
    """Pieces in flight, on average."""

    @property
    def rate(self) -> float:
        """Both directions together."""
        return self.read + self.write


@dataclass(frozen=True, kw_only=True)
class Space:
    """The points that may be tried. The coarse grid is every other value of an axis and its ends; the files axis only
    starts with its first value."""

    backends: Sequence[str]
    blocks: Sequence[int]
    depths: Sequence[int]
    files: Sequence[int] = (1,)
    max_inflight_bytes: int = 256 * MIB
    """Points with more are left out: the memory for them is not there."""
    workloads: Sequence[Workload] = field(default=tuple(Workload))

    def __post_init__(self) -> None:
        for name in ("backends", "blocks", "depths", "files", "workloads"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: nothing to try; give at least one value")
            if name in ("blocks", "depths", "files") and (sorted(set(values)) != list(values) or values[0] < 1):
                raise ValueError(f"{name}: {list(values)}: want positive numbers, each once, the smallest first")
        if not any(self.coarse()):
            raise ValueError(
                f"every point needs more than {self.max_inflight_bytes} bytes of buffers: "
                "give smaller block sizes or queue depths, or a larger --buffer"
            )

    def allows(self, point: Point) -> bool:
        """Whether the buffers suffice."""
        return point.inflight_bytes <= self.max_inflight_bytes

    def coarse(self) -> list[Point]:
        """The points of the first pass, ordered so that any beginning of the list covers the grid about evenly."""
        grid = itertools.product(self.backends, coarse_axis(self.blocks), coarse_axis(self.depths))
        points = [
            Point(backend=backend, block_bytes=block, queue_depth=depth, files=self.files[0])
            for backend, block, depth in grid
        ]
        allowed = [point for point in points if self.allows(point)]
        return [allowed[index] for index in spread_order(len(allowed))]

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Points that differ from `point` by one step on one axis; the other backends count as one step."""
        for backend in self.backends:
            yield from self._moved(point, backend=backend)
        for name, axis in (("block_bytes", self.blocks), ("queue_depth", self.depths), ("files", self.files)):
            position = list(axis).index(getattr(point, name))
            for index in (position - 1, position + 1):
                if 0 <= index < len(axis):
                    yield from self._moved(point, **{name: axis[index]})

    def _moved(self, point: Point, **change: object) -> Iterator[Point]:
        values: dict[str, object] = {
            "backend": point.backend,
            "block_bytes": point.block_bytes,
            "queue_depth": point.queue_depth,
            "files": point.files,
        }
        moved = Point(**(values | change))  # type: ignore[arg-type]
        if moved != point and self.allows(moved):
            yield moved


def coarse_axis(values: Sequence[int]) -> list[int]:
    """Every other value, and always both ends; short axes whole."""
    if len(values) <= 3:
        return list(values)
    chosen = list(values[::2])
    return chosen if chosen[-1] == values[-1] else [*chosen, values[-1]]


def spread_order(count: int) -> list[int]:
    """0 to count - 1 so that each beginning of the list lies about evenly in the range (van der Corput)."""
    bits = max(1, (count - 1).bit_length())
    mirrored = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in mirrored if number < count]

"""How many times slower than modelled a link reads and writes, from what whole steps measured; pure, over plain data.

[Note: two directions of one disk]
A step tells how long a disk was busy and how many bytes went each way: one equation for two rates. While both directions are
under way a slow one makes the other wait, so that the time that requests take tells nothing of whose fault it is. But most steps
also have times when one direction is alone, and those tell its rate; what happened in the mix then tells that of the other. These
three equations are solved by least squares, and both rates are scaled so that the step's whole time comes out as measured.
Where nothing tells the directions apart, both are taken to have changed alike.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .mix import mix_weights, mixed_seconds

WINDOW = 5
"""Measurements that a correction is the median of."""
THRESHOLD = 0.1
"""Relative change below which a correction stays as it is (hysteresis)."""
CLIP = 32.0
"""A single measurement counts as at most this many times slower or faster than modelled."""
MIX_TRUST = 0.25
"""What the time of a mix counts beside that of a direction alone: how two streams share a disk is known less well."""
ALIKE = 0.02
"""What it counts that both directions change alike: little, so that it decides only where hardly anything else does."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What one direction did while the other did nothing."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a link did in one step: bytes each way, the seconds that it was busy, and what of them each direction did alone."""

    link: str
    read_bytes: int
    written_bytes: int
    busy_s: float
    reads_alone: Alone = Alone()
    writes_alone: Alone = Alone()


@dataclass(frozen=True, kw_only=True)
class Spell:
    """Part of a step: how long it lasted, and how long its reads and its writes would take alone, as modelled. ``blur_s``: by how
    much the two may miss each other, since what is in flight when it begins or ends belongs to it in part."""

    seconds: float
    read_s: float = 0.0
    write_s: float = 0.0
    blur_s: float = 0.0

    def equation(self, of_reads: float, of_writes: float, *, trust: float = 1.0) -> tuple[float, float, float]:
        """What it says of how many times slower reads and writes are. Errors count as a share of it; a short one says less."""
        weight = trust / (self.seconds + self.blur_s)
        return weight * of_reads * self.read_s, weight * of_writes * self.write_s, weight * self.seconds


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's busy time, apart by what was under way."""

    reads: Spell
    writes: Spell
    both: Spell
    mix_gain: float

    def modelled_s(self, reading: float, writing: float) -> float:
        """Seconds of all of it on a link that is so many times slower than modelled."""
        mixed = mixed_seconds(self.both.read_s * reading, self.both.write_s * writing, self.mix_gain)
        return self.reads.read_s * reading + self.writes.write_s * writing + mixed

    def times_slower(self, before: tuple[float, float]) -> tuple[float, float]:
        """How many times slower than modelled reads and writes were: [Note: two directions of one disk]. ``before``: as they
        counted until now."""
        reading, writing = before
        for _ in range(2):  # which stream is the longer one in the mix depends on the outcome
            of_reads, of_writes = mix_weights(self.both.read_s * reading, self.both.write_s * writing, self.mix_gain)
            reading, writing = _least_squares(
                [
                    self.reads.equation(1.0, 0.0),
                    self.writes.equation(0.0, 1.0),
                    self.both.equation(of_reads, of_writes, trust=MIX_TRUST),
                    (ALIKE / before[0], -ALIKE / before[1], 0.0),
                ]
            )
        reading = max(reading, writing * before[0] / before[1] / CLIP)
        writing = max(writing, reading * before[1] / before[0] / CLIP)
        level = (self.reads.seconds + self.writes.seconds + self.both.seconds) / self.modelled_s(reading, writing)
        return reading * level, writing * level


def _least_squares(equations: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """x and y that come nearest to all of a x + b y = c."""
    rows = list(equations)
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant


@dataclass(kw_only=True)
class Correction:
    """How many times slower than modelled one direction is: the median of the last few steps, with hysteresis.

    ``factor`` moves only when the median of a window that is at least half full is further from it than ``THRESHOLD``; a single
    outlier therefore changes nothing.
    """

    factor: float = 1.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def latest(self) -> float:
        """The median of the window, without hysteresis; ``factor`` while it is less than half full."""
        if len(self.samples) <= WINDOW // 2:
            return self.factor
        odd = len(self.samples) - 1 | 1  # of an even number, half of which are from before a change, it would be a mean
        return statistics.median(list(self.samples)[-odd:])

    def observe(self, ratio: float) -> bool:
        """Take one measurement; True when the factor moved."""
        self.samples.append(min(max(ratio, self.factor / CLIP), self.factor * CLIP))
        median = self.latest
        if abs(median / self.factor - 1) <= THRESHOLD:
            return False
        self.factor = median
        # What was measured before a change says nothing about the time after it.
        recent = [sample for sample in self.samples if abs(sample / median - 1) <= THRESHOLD]
        self.samples = deque(recent, maxlen=WINDOW)
        return True


@dataclass(kw_only=True)
class Corrections:
    """Those of both directions of one link."""

    reads: Correction = field(default_factory=Correction)
    writes: Correction = field(default_factory=Correction)
    _work: Work | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """How many times slower than modelled the link counts as: its reads, its writes."""
        return self.reads.factor, self.writes.factor

    @property
    def latest(self) -> tuple[float, float]:
        """The same of the last few steps, without hysteresis."""
        return self.reads.latest, self.writes.latest

    @property
    def factor(self) -> float:
        """How many times longer the work measured last takes than modelled."""
        return self._work.modelled_s(*self.factors) / self._work.modelled_s(1.0, 1.0) if self._work else 1.0

    def observe(self, work: Work) -> bool:
        """Take one step's work, by the rates that were modelled at first; True when a factor moved."""
        self._work = work
        reading, writing = work.times_slower(self.factors)
        moved = self.reads.observe(reading)
        return self.writes.observe(writing) or moved

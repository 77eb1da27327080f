"""Rounds of `lamina aio`: every subject at every shape once a round, and the medians of the rounds' ratios as tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.bench.report import Reporter

from .subjects import Sample, Shape, Subject

MIB = 1 << 20
BASE = "fio"


@dataclass
class Series:
    """The samples of one subject at one shape, round by round."""

    samples: list[Sample] = field(default_factory=list)

    def gbps(self) -> float:
        """Median."""
        return statistics.median(sample.gbps for sample in self.samples)

    def cpu(self) -> float:
        """Median seconds per GiB."""
        return statistics.median(sample.cpu_s_per_gib for sample in self.samples)

    def ratios(self, others: "Series | None", attribute: str = "gbps") -> list[float]:
        """Round by round; empty where there is nothing to compare with."""
        if others is None:
            return []
        pairs = zip(self.samples, others.samples, strict=False)
        both = [(getattr(mine, attribute), getattr(theirs, attribute)) for mine, theirs in pairs]
        return [mine / theirs for mine, theirs in both if theirs > 0]


Results = dict[Shape, dict[str, Series]]


def run_rounds(subjects: Mapping[str, Subject], shapes: Sequence[Shape], rounds: int, report: Reporter) -> Results:
    """Every other round in reverse, so that order favours nobody."""
    results: Results = {shape: {name: Series() for name in subjects} for shape in shapes}
    with report.progress(rounds * len(shapes), title="rounds") as progress:
        for number in range(rounds):
            for shape in shapes:
                names = list(subjects) if number % 2 == 0 else list(subjects)[::-1]
                for name in names:
                    if takes_part(name, shape):
                        results[shape][name].samples.append(subjects[name](shape))
                progress.advance(f"round {number + 1}: {shape.direction}")
    return results


def takes_part(name: str, shape: Shape) -> bool:
    """DeepSpeed's handle moves one way at a time; what fio does to blocks before writing does not concern reads."""
    return not (shape.direction == "rw" and name.startswith("DeepSpeed")) and not (
        shape.direction == "read" and name == "fio, scrambling"
    )


def rival_of(name: str) -> str | None:
    """Whom of DeepSpeed's a row of ours is compared with: the same kind of memory."""
    kind = {"large": "pinned", "ordinary": "ordinary"}.get(name.rpartition(", ")[2])
    return f"DeepSpeed, {kind}" if kind and not name.startswith("DeepSpeed") else None


def median(values: Sequence[float]) -> float | None:
    """None without values."""
    return statistics.median(values) if values else None


def show(value: float | None, digits: int = 2) -> str:
    """A figure for a table."""
    return "–" if value is None else f"{value:.{digits}f}"


def span(values: Sequence[float]) -> str:
    """Least and most."""
    return f"{min(values):.2f}–{max(values):.2f}" if values else "–"


def tabulate(results: Results, report: Reporter) -> list[dict[str, Any]]:
    """Prints one table for each shape; returns the figures as plain data."""
    rows: list[dict[str, Any]] = []
    for shape, series in results.items():
        has_peer = any(name.startswith("DeepSpeed") and found.samples for name, found in series.items())
        lines = []
        for name, mine in series.items():
            if not mine.samples:
                continue
            to_fio = mine.ratios(series.get(BASE))
            large = series.get(name.replace("ordinary", "large")) if "ordinary" in name else None
            kept, cpu = median(mine.ratios(large)), median(mine.ratios(series.get(BASE), "cpu_s_per_gib"))
            rival = median(mine.ratios(series.get(rival_of(name) or "")))
            row = {"subject": name, "direction": shape.direction, "block_bytes": shape.block_bytes}
            row |= {"depth": shape.depth, "gbps": mine.gbps(), "cpu_s_per_gib": mine.cpu()}
            row |= {"gbps_to_fio": median(to_fio), "gbps_to_fio_each": to_fio, "cpu_to_fio": cpu}
            row |= {"gbps_to_large": kept, "gbps_to_deepspeed": rival}
            rows.append(row)
            line = [name, show(mine.gbps()), span([sample.gbps for sample in mine.samples])]
            line += [show(median(to_fio)), span(to_fio), show(kept), *([show(rival)] if has_peer else [])]
            lines.append([*line, show(1000 * mine.cpu(), 1), show(cpu)])
        peer = ["to DS"] if has_peer else []
        report.table(
            f"{shape.direction}, {shape.nbytes // MIB} MiB in blocks of {shape.block_bytes // MIB} MiB, depth {shape.depth}",
            ["", "GB/s", "range", "to fio", "range", "to large", *peer, "CPU ms/GiB", "to fio"],
            lines,
        )
    return rows

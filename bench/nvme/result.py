"""A run as JSON, as a block for the config, and as a profile."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.tiers.links.profile import DiskProfile, MachineRates, Profile, Rate, Together

from .args import Options
from .measure import num_threads
from .outcome import Outcome, PathOutcome
from .points import Measured, Point, Workload
from .verdict import Best, Summary, summarise


def aio_block(point: Point) -> dict[str, Any]:
    """What to paste into a config."""
    return {
        "aio": {
            "block_size": point.block_bytes,
            "queue_depth": point.queue_depth,
            "intra_op_parallelism": num_threads(point) if point.backend == "threads" else 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "tiers": {"io_backend": point.backend},
    }


def point_as_dict(point: Point) -> dict[str, Any]:
    """Plain data."""
    return {
        "backend": point.backend,
        "block_bytes": point.block_bytes,
        "queue_depth": point.queue_depth,
        "files": point.files,
    }


def summary_as_dict(summary: Summary) -> dict[str, Any]:
    """Plain data, bytes per second."""
    return {
        "median": summary.median,
        "low": summary.low,
        "high": summary.high,
        "sure": summary.sure,
        "samples": summary.samples,
        "spread": summary.spread,
    }


def _measured(one: Measured) -> dict[str, Any]:
    return {
        "workload": one.trial.workload.value,
        "phase": one.trial.phase.value,
        **point_as_dict(one.trial.point),
        "seconds": one.trial.seconds,
        "read": one.read,
        "write": one.write,
        "latency_s": one.latency_s,
        "depth": one.depth,
    }


def _best(found: Best) -> dict[str, Any]:
    return {
        "point": point_as_dict(found.point),
        "rate": summary_as_dict(found.rate),
        "read": found.read,
        "write": found.write,
        "latency_s": found.latency_s,
        "rivals": [point_as_dict(point) for point in found.rivals],
        "certainty": found.certainty,
    }


def _pair(rates: tuple[float, float]) -> dict[str, float]:
    return {"read": rates[0], "write": rates[1]}


def path_as_dict(found: PathOutcome) -> dict[str, Any]:
    """One path, rates in bytes per second."""
    chosen = found.chosen
    return {
        "path": str(found.path),
        "device": {name: getattr(found.identity, name) for name in found.identity.__dataclass_fields__},
        "file_system": found.created.file_system,
        "direct": found.created.direct,
        "reason": found.created.reason,
        "alignment": found.created.alignment,
        "preallocated": found.created.preallocated,
        "page_kind": found.page_kind,
        "first_write": found.created.first_write,
        "written_bytes": found.written_bytes,
        "best": {workload.value: _best(one) for workload, one in found.best.items()},
        "chosen": None if chosen is None else point_as_dict(chosen),
        "config": None if chosen is None else aio_block(chosen),
        "pages": {
            workload.value: {
                "huge": summary_as_dict(effect.huge),
                "small": summary_as_dict(effect.small),
                "gain": effect.gain,
            }
            for workload, effect in found.pages.items()
        },
        "region_gain": found.region_gain,
        "processes": {workload.value: _pair(rates) for workload, rates in found.processes.items()},
        "fio": [
            {
                "workload": pair.workload.value,
                "point": point_as_dict(pair.point),
                "fio_point": point_as_dict(pair.fio_point),
                "ours": list(pair.ours),
                "fio": list(pair.fio),
                "same": list(pair.same),
                "ratio": pair.ratio,
                "same_ratio": pair.same_ratio,
                "fio_page_kind": pair.fio_page_kind,
                "grid": [{**point_as_dict(point), "rate": rate} for point, rate in pair.grid.items()],
            }
            for pair in found.fio
        ],
        "warnings": [{"doubt": one.doubt.value, "text": one.text} for one in found.warned],
        "notes": found.notes,
        "trials": [_measured(one) for one in found.results],
    }


def as_result(options: Options, machine: Mapping[str, object], outcome: Outcome) -> dict[str, Any]:
    """The JSON of a run; rates in bytes per second."""
    return {
        "command": "nvme",
        "machine": dict(machine),
        "seconds": outcome.seconds,
        "size_bytes": options.size_bytes,
        "read_share": options.read_share,
        "processes": options.processes,
        "paths": [path_as_dict(found) for found in outcome.paths],
        "together": {workload.value: _pair(rates) for workload, rates in outcome.together.items()},
        "rates": dict(outcome.rates),
        "skipped": dict(outcome.skipped),
    }


def _rate(values: Sequence[float]) -> Rate:
    summary = summarise(values)
    return Rate(median=summary.median, low=summary.low, high=summary.high, samples=summary.samples)


def _disk(found: PathOutcome, options: Options) -> DiskProfile | None:
    runs = {workload: found.at_chosen(workload) for workload in Workload}
    point = found.chosen
    if point is None or not all(runs.values()):
        return None
    return DiskProfile(
        path=str(found.path),
        identity=found.identity,
        direct=found.created.direct,
        page_kind=found.page_kind,
        backend=point.backend,
        block_bytes=point.block_bytes,
        queue_depth=point.queue_depth,
        num_threads=num_threads(point),
        files=point.files,
        read=_rate([one.read for one in runs[Workload.READ]]),
        write=_rate([one.write for one in runs[Workload.WRITE]]),
        mixed_read=_rate([one.read for one in runs[Workload.MIX]]),
        mixed_write=_rate([one.write for one in runs[Workload.MIX]]),
        read_share=options.read_share,
        read_latency_s=statistics.median(one.latency_s for one in runs[Workload.READ]),
        write_latency_s=statistics.median(one.latency_s for one in runs[Workload.WRITE]),
        first_write=found.created.first_write,
    )


def build_profile(options: Options, machine: Mapping[str, object], outcome: Outcome, *, now: float) -> Profile | None:
    """The profile of this run; None when a workload was left out, and so a figure is missing."""
    disks = [_disk(found, options) for found in outcome.paths]
    known = tuple(disk for disk in disks if disk is not None)
    if len(known) < len(disks):
        return None
    together = None
    if outcome.together:
        both = outcome.together
        together = Together(
            read=both[Workload.READ][0],
            write=both[Workload.WRITE][1],
            mixed_read=both[Workload.MIX][0],
            mixed_write=both[Workload.MIX][1],
        )
    names = MachineRates.__dataclass_fields__
    return Profile(
        created=now,
        processor=str(machine["cpu"]),
        cores=int(str(machine["cores"])),
        disks=known,
        together=together,
        machine=MachineRates(**{name: rate for name, rate in outcome.rates.items() if name in names}),
    )

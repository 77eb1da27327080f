"""A step in lanes of time (each link, compute, the optimizer): simulated for a planned placement, or as a run recorded it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.engine.planner import Option, PlanError
from lamina.engine.planner.case import Case
from lamina.engine.planner.quantity import GB
from lamina.tiers import BandwidthModel, ComputeTimes, Curve, Link, PlacementQuestion, Simulation, simulate
from lamina.tiers.bandwidth import DISK, TO_DEVICE
from lamina.tiers.homes import Budgets

_COLOURS = ("#3b6ea5", "#d98c3f", "#5a9e6f", "#b5506b", "#9a86b8", "#8c6d46", "#4aa3a2")
ADAM_BYTES = 28
"""Read and written per element by an fp32 update."""
BACKWARD_SHARE = 2 / 3
"""Of the operations of both passes."""


def simulated(item: Option) -> Simulation:
    """The step of a planned placement, with every span. Raises PlanError for rates that are missing."""
    case = item.case
    question = PlacementQuestion(
        segments=case.segments,
        budgets=Budgets(),
        wishes=case.wishes,
        links=_links(case),
        times=_times(item),
        generations=case.buffers.generations,
        micro_batches=case.load.accumulation,
        lookahead=case.buffers.lookahead,
    )
    return simulate(question.step(question.place()), question.links, record=True)


def _links(case: Case) -> BandwidthModel:
    """Of one rank: ranks of one host share its drives."""
    machine, found = case.machine, []
    if machine.nvme_read_bandwidth and machine.nvme_write_bandwidth:
        found.append(
            Link(
                name=DISK,
                read=Curve.flat(machine.nvme_read_bandwidth),
                write=Curve.flat(machine.nvme_write_bandwidth),
                mix_gain=2.0 if machine.nvme_full_duplex else 1.0,
                sharers=machine.devices_per_host,
            )
        )
    if not machine.shared_memory:
        rate = Curve.flat(machine.rate("link_bandwidth", "a timeline"))
        found.append(Link(name=TO_DEVICE, read=rate, write=rate, mix_gain=2.0))
    return BandwidthModel(found)


def _times(item: Option) -> ComputeTimes:
    case, passes_s = item.case, item.time.passes.get("compute", 0.0) / item.case.load.accumulation
    rate = case.machine.rate("host_bandwidth", "a timeline") / case.machine.devices_per_host / ADAM_BYTES
    return ComputeTimes.proportional(
        case.segments,
        forward_s=passes_s * (1 - BACKWARD_SHARE),
        backward_s=passes_s * BACKWARD_SHARE,
        adam_elements_per_s=rate,
    )


Lanes = Mapping[str, Sequence[tuple[str, float, float]]]
"""By lane: name, begin and end in seconds."""


def lanes_of(trace: Mapping[str, Any]) -> Lanes:
    """Lanes of a Chrome trace. Raises PlanError for what is none."""
    try:
        events = trace["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        lanes: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                begin = event["ts"] / 1e6
                lanes[names[event["tid"]]].append((event["name"], begin, begin + event["dur"] / 1e6))
    except (KeyError, TypeError) as error:
        raise PlanError(f"no Chrome trace with named lanes: {error!r} is missing") from error
    return lanes


def draw(lanes: Lanes, path: Path, *, title: str) -> None:
    """Write a picture; the format follows from the file's suffix. Raises PlanError without matplotlib, or without lanes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--timeline wants matplotlib: pip install 'lamina[plot]'") from error
    if not any(lanes.values()):
        raise PlanError("there is nothing to draw: the trace has no spans")
    figure = Figure(figsize=(11, 0.6 * len(lanes) + 1.4), layout="constrained")
    axis = figure.subplots()
    for row, (colour, spans) in enumerate(zip(_cycle(len(lanes)), reversed(list(lanes.values())), strict=True)):
        axis.broken_barh(
            [(begin, end - begin) for _, begin, end in spans],
            (row - 0.36, 0.72),
            facecolors=colour,
            edgecolor="white",
            linewidth=0.4,
        )
    axis.set_yticks(range(len(lanes)), [*reversed(list(lanes))])
    axis.set_xlabel("seconds")
    axis.set_title(title, fontsize=11)
    figure.savefig(path, dpi=130)


def _cycle(number: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(number)]


def write_timeline(item: Option, path: Path) -> str:
    """Picture of an option's simulated step, and beside it the Chrome trace (.json); a sentence that says so."""
    done = simulated(item)
    trace = path.with_suffix(".json")
    done.spans.write(trace)
    lanes = lanes_of(json.loads(trace.read_text()))
    disk = done.read_bytes + done.written_bytes
    title = f"{item.label}: {done.step_s:.3f} s simulated, {disk / GB:.2f} GB of disk traffic, {done.binding or 'compute'} binds"
    draw(lanes, path, title=title)
    return f"timeline of {item.label} written to {path}, its trace to {trace}"

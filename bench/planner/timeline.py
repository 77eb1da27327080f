"""The step of a planned placement, simulated and drawn."""

from pathlib import Path

from lamina.bench.timeline import draw, read_step, require_drawable
from lamina.engine.planner import Option
from lamina.engine.planner.case import Case
from lamina.engine.planner.quantity import GB
from lamina.tiers import BandwidthModel, ComputeTimes, Curve, Link, PlacementQuestion, Simulation, simulate
from lamina.tiers.links.bandwidth import DISK, TO_DEVICE
from lamina.tiers.placement.homes import Budgets

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


def write_timeline(item: Option, path: Path) -> str:
    """Picture of an option's simulated step, and beside it the Chrome trace (.json); a sentence that says so.

    Raises TimelineError without matplotlib."""
    require_drawable(path)
    done = simulated(item)
    trace = path.with_suffix(".json")
    done.spans.write(trace)
    disk = done.read_bytes + done.written_bytes
    title = f"{item.label}: {done.step_s:.3f} s simulated, {disk / GB:.2f} GB of disk traffic, {done.binding or 'compute'} binds"
    draw([read_step(trace, title=title)], path)
    return f"timeline of {item.label} written to {path}, its trace to {trace}"

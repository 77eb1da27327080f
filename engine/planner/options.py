"""Every placement of one question, with bytes, fit, time and wear; the fastest that fits; and what to
change next."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.case import Case
from lamina.engine.planner.channel_bytes import nvme_written_per_host, uses_nvme
from lamina.engine.planner.fit import Fit, fit
from lamina.engine.planner.footprint import Footprint, footprint
from lamina.engine.planner.largest import largest_gpt
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.obstacles import obstacles
from lamina.engine.planner.placement import DEVICE, HOST, NVME, Placement, all_placements
from lamina.engine.planner.quantity import format_bytes, format_seconds
from lamina.engine.planner.step_time import StepTime, step_time
from lamina.engine.planner.wear import Wear, drive_wear
from lamina.engine.planner.workload import Workload

_TIER_RANK = {DEVICE: 0, HOST: 1, NVME: 2}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the planner."""

    model: ModelShape
    load: Workload
    machine: Machine
    buffers: Buffers = field(default_factory=Buffers)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    tensor: int = 1
    pipeline: int = 1
    activations: str = DEVICE


@dataclass(frozen=True, kw_only=True)
class Option:
    """One placement and all that is predicted of it."""

    case: Case
    held: Footprint
    verdict: Fit
    time: StepTime
    wear: Wear | None
    """None when the state is not on nvme or the drives' endurance is not known."""
    obstacles: tuple[str, ...]
    """Why this engine would not run it, though the machine could; empty when it runs."""

    @property
    def label(self) -> str:
        """Name of the placement."""
        return self.case.place.label

    @property
    def fits(self) -> bool:
        """It fits the machine."""
        return self.verdict.fits

    @property
    def runs(self) -> bool:
        """This engine does it."""
        return not self.obstacles


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change of machine or workload and what it would give."""

    what: str
    label: str
    """The best placement after the change."""
    gain: float
    """Tokens per second after over before; infinite when nothing fitted before."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer."""

    question: Question
    options: tuple[Option, ...]
    """All placements, those that this engine runs before others and of each the fastest first.

    Gradients on nvme only where host memory is too small for them.
    """
    advice: tuple[Advice, ...]
    """Changes that help, largest gain first."""
    largest: ModelShape | None
    """The largest model of the same kind that any placement can train on this machine; None when not even a
    small one."""

    @property
    def best(self) -> Option | None:
        """The fastest that fits."""
        return best_of(self.options)

    @property
    def nearest(self) -> Option:
        """Of what the engine runs the one that is least over its limits, as shares of them."""
        return min([item for item in self.options if item.runs] or self.options, key=_excess)

    @property
    def reason(self) -> str:
        """Why the best one is recommended, or why none fits."""
        return _reason(self)


def plan(question: Question, *, with_advice: bool = True, with_largest: bool = True) -> Plan:
    """Answer a question. Raises PlanError that names what is missing or impossible."""
    options = tuple(sorted(_useful(tuple(evaluate(question))), key=_order))
    best = best_of(options)
    return Plan(
        question=question,
        options=options,
        advice=tuple(_advice(question, best)) if with_advice else (),
        largest=largest_on(question) if with_largest else None,
    )


def evaluate(question: Question) -> Iterator[Option]:
    """All placements of the question. Placements on nvme are left out when the machine has none."""
    places = all_placements(
        stages=question.stages,
        tensor=question.tensor,
        pipeline=question.pipeline,
        nvme=question.machine.nvme_bytes > 0,
        activations=question.activations,
    )
    for place in places:
        yield option(question, place)


def _useful(options: tuple[Option, ...]) -> Iterator[Option]:
    """Gradients on nvme are slower and have no merit where they fit host memory."""
    fitting = {item.case.place for item in options if item.fits}
    for item in options:
        place = item.case.place
        if place.grad != NVME or replace(place, grad=HOST) not in fitting:
            yield item


def option(question: Question, place: Placement) -> Option:
    """One placement of the question."""
    case = Case(
        model=question.model,
        load=question.load,
        place=place,
        machine=question.machine,
        buffers=question.buffers,
    )
    held, time = footprint(case), step_time(case)
    wear = None
    if uses_nvme(case) and case.machine.drive_tbw is not None:
        wear = drive_wear(
            bytes_per_step=nvme_written_per_host(case),
            rated_tbw=case.machine.drive_tbw,
            drives=case.machine.drives,
            step_s=time.step_s,
        )
    return Option(case=case, held=held, verdict=fit(case, held), time=time, wear=wear, obstacles=tuple(obstacles(case)))


def best_of(options: tuple[Option, ...]) -> Option | None:
    """The fastest that fits; of equals the one that uses fewer and faster tiers.

    Of what the engine does not run only where it runs none of them at all: a split that was asked for, say.
    """
    asked = [item for item in options if item.runs] or options
    return min((item for item in asked if item.fits), key=_order, default=None)


def _order(item: Option) -> tuple[bool, float, int, int]:
    place = item.case.place
    depth = _TIER_RANK[place.param] + _TIER_RANK[place.optimizer] + _TIER_RANK[place.grad]
    return (not item.runs, -item.time.tokens_per_s, depth, place.stage)


def _reason(answer: Plan) -> str:
    best = answer.best
    if best is None:
        nearest = answer.nearest
        over = nearest.verdict.overfull
        if over is None or over.offender is None:
            return "nothing fits"
        kind, nbytes = over.offender
        kept = f"; host_reserve_bytes leaves {format_bytes(over.reserve)} to all else" if over.reserve else ""
        return (
            f"nothing fits. Nearest is {nearest.label}: {over.tier} needs {format_bytes(over.need)} of "
            f"{format_bytes(over.limit)} ({over.phase}{kept}), most of it {kind} ({format_bytes(nbytes)})"
        )
    faster = [item for item in answer.options if not item.fits and _order(item) < _order(best)]
    others = [item for item in answer.options if item.fits and item is not best and item.runs is best.runs]
    text = f"{best.label}: the fastest of {len(others) + 1} that fit, bound by {best.time.binding}"
    if not best.runs:
        text = f"{best.label} (not by this engine: {'; '.join(best.obstacles)}){text.removeprefix(best.label)}"
    slower = [item for item in others if item.time.step_s > best.time.step_s * 1.005]
    if slower:
        share = best.time.tokens_per_s / slower[0].time.tokens_per_s - 1
        text += f"; {slower[0].label} follows, {share:.0%} slower"
    if faster:
        over = faster[0].verdict.overfull
        text += f"; {faster[0].label} would take {format_seconds(faster[0].time.step_s)}"
        if over is not None:
            text += f" but needs {format_bytes(over.need)} of {over.tier}"
    return text


def _excess(item: Option) -> float:
    return sum(max(use.need - use.limit, 0) / max(use.limit, 1) for use in item.verdict.tiers)


def _variants(question: Question) -> Iterator[tuple[str, Question]]:
    machine, load = question.machine, question.load
    if machine.nvme_bytes:
        more = machine.with_changes({"nvme": machine.drives + 1})
        yield f"one more drive ({more.drives} a host)", replace(question, machine=more)
    for factor in (2, 4):
        more = replace(machine, host_bytes=machine.host_bytes * factor)
        yield f"{factor} x host memory ({format_bytes(more.host_bytes)})", replace(question, machine=more)
    if not machine.shared_memory:
        more = replace(machine, devices_per_host=machine.devices_per_host * 2)
        yield f"{more.devices_per_host} devices a host", replace(question, machine=more)
    yield (
        f"micro-batch {load.micro_batch * 2}",
        replace(question, load=replace(load, micro_batch=load.micro_batch * 2)),
    )
    if load.micro_batch > 1:
        smaller = replace(load, micro_batch=load.micro_batch // 2)
        yield f"micro-batch {smaller.micro_batch}", replace(question, load=smaller)
    yield (
        f"accumulation {load.accumulation * 2}",
        replace(question, load=replace(load, accumulation=load.accumulation * 2)),
    )
    if load.checkpoint_interval:
        kept = replace(load, checkpoint_interval=0)
        yield "no activation checkpointing", replace(question, load=kept)
    else:
        again = replace(load, checkpoint_interval=1)
        yield "activation checkpointing", replace(question, load=again)


def _advice(question: Question, before: Option | None) -> list[Advice]:
    found: list[Advice] = []
    for what, changed in _variants(question):
        after = best_of(tuple(evaluate(changed)))
        if after is None:
            continue
        gain = float("inf") if before is None else after.time.tokens_per_s / before.time.tokens_per_s
        # Host memory comes twice, the second time more of it: that must give more, too.
        least = max((item.gain for item in found if "host memory" in item.what), default=1.0)
        if gain > 1.02 * (least if "host memory" in what else 1.0):
            found.append(Advice(what=what, label=after.label, gain=gain))
    return sorted(found, key=lambda item: -item.gain)


def largest_on(question: Question) -> ModelShape | None:
    """The largest model of the question's kind over all placements that the engine runs, by parameters."""
    places = all_placements(
        stages=question.stages,
        tensor=question.tensor,
        pipeline=question.pipeline,
        nvme=question.machine.nvme_bytes > 0,
        activations=question.activations,
    )
    cases = [
        Case(
            model=question.model,
            load=question.load,
            place=place,
            machine=question.machine,
            buffers=question.buffers,
        )
        for place in places
    ]
    found = [largest_gpt(case) for case in cases if not any(obstacles(case))]
    return max((shape for shape in found if shape is not None), key=lambda shape: shape.total_params, default=None)

"""The placement whose simulated step is shortest, and why: which link binds, what more of anything would give. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .bandwidth import DISK, BandwidthModel
from .homes import Budgets, Home, SegmentSize, Wishes
from .placement import Placement, PlacementError, place, placement_at
from .shares import met_shares, said_shares
from .simulate import Simulation, simulate
from .step_model import ComputeTimes, StepModel, model_step
from .tier import Tier

MAX_CANDIDATES = 9
MAX_COMPARED = 600
"""Segments times candidates: with more of them fewer candidates are compared, since the choice is made while users wait."""
WORTH_IT = 0.005
"""Another candidate must be this much faster, as a share, to be taken instead of the usual one."""
LATENCY_BOUND = 0.75
"""Where even the busiest channel is idle for more than this share of a step, what is waited for is single transfers; phases
in which one channel after the other binds leave the busiest one less idle than that."""
LINK_WORDS = {DISK: "the disk", "host->device": "the way to the device", "compute": "compute"}


@dataclass(frozen=True, kw_only=True)
class PlacementQuestion:
    """All that decides a placement: sizes, limits, wishes, and how fast everything is."""

    segments: tuple[SegmentSize, ...]
    budgets: Budgets
    wishes: Wishes
    links: BandwidthModel
    times: ComputeTimes
    generations: int = 2
    together: tuple[tuple[int, ...], ...] = ()
    micro_batches: int = 1
    lookahead: int = 64
    order: tuple[int, ...] = ()
    """Groups as one micro-batch uses them, from a trace; empty for all of them there and back."""
    fixed: Mapping[str, Home] = field(default_factory=dict)
    """Homes of segments that are not asked about."""

    def place(self, *, state_first: int = 0) -> Placement:
        """One placement; raises PlacementError when the budgets cannot work."""
        return place(
            self.segments,
            self.budgets,
            self.wishes,
            generations=self.generations,
            together=self.together,
            state_first=state_first,
            fixed=self.fixed,
        )

    def placement_at(self, homes: Mapping[str, Home], *, like: Placement) -> Placement:
        """What segments at given homes need, with the update buffers of another placement. Budgets are not looked at."""
        return placement_at(
            self.segments,
            homes,
            self.budgets,
            self.wishes,
            like=like,
            generations=self.generations,
            together=self.together,
        )

    def step(self, placement: Placement) -> StepModel:
        """What a step does under a placement. Device memory that is left over widens the window."""
        wishes, budgets = self.wishes, self.budgets
        window = placement.device_items.get("window of fetched groups", 0)
        if budgets.device_bytes is not None:
            window += budgets.device_bytes - placement.device_bytes
        return model_step(
            self.segments,
            placement,
            self.times,
            micro_batches=self.micro_batches,
            overlap_update=wishes.overlap_update,
            retain_gradients=wishes.retain_gradients,
            window_bytes=window,
            host_budget=budgets.host_bytes,
            in_place_tiers=wishes.in_place_tiers,
            separate_device=wishes.separate_device,
            lookahead=self.lookahead,
            order=self.order,
        )

    def predict(self, placement: Placement) -> Simulation:
        """The simulated step under a placement."""
        return simulate(self.step(placement), self.links)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement and its predicted step. ``tried`` maps how many segments' states came first to predicted seconds;
    ``state_first`` is the number that was taken."""

    question: PlacementQuestion
    placement: Placement
    predicted: Simulation
    tried: Mapping[int, float]
    state_first: int = 0

    @classmethod
    def given(cls, question: PlacementQuestion, placement: Placement) -> "Choice":
        """No choice: what is predicted for a placement that something else decided."""
        predicted = question.predict(placement)
        return cls(question=question, placement=placement, predicted=predicted, tried={0: predicted.step_s})


def choose(question: PlacementQuestion, *, usual: Placement | None = None) -> Choice:
    """The best of a few placements that differ in whether memory goes to parameters or to optimizer states first.

    The usual order (parameters first) is kept unless another is clearly faster; ``usual`` is its placement where that is
    known already. Raises PlacementError when the budgets cannot work.
    """
    best: Choice | None = None
    tried: dict[int, float] = {}
    seen: dict[tuple[Home, ...], float] = {}
    for state_first in _candidates(sum(segment.trained for segment in question.segments)):
        placement = usual if usual is not None and not state_first else question.place(state_first=state_first)
        key = tuple(placement.homes.values())
        if key in seen:
            tried[state_first] = seen[key]
            continue
        predicted = question.predict(placement)
        tried[state_first] = seen[key] = predicted.step_s
        if best is None or predicted.step_s < best.predicted.step_s * (1 - WORTH_IT):
            best = Choice(
                question=question, placement=placement, predicted=predicted, tried=tried, state_first=state_first
            )
    if best is None:
        raise PlacementError("no segments to place")
    return _undivided(best)


def _undivided(choice: Choice) -> Choice:
    """The same order of memory without dividing a segment's state, where that is clearly faster: the gradient of a divided
    one waits for the step, and its front is updated only then."""
    question, placement = choice.question, choice.placement
    if not question.wishes.divide_state or not any(home.kept for home in placement.homes.values()):
        return choice
    as_wholes = replace(question, wishes=replace(question.wishes, divide_state=False))
    whole = as_wholes.place(state_first=choice.state_first)
    predicted = question.predict(whole)
    if predicted.step_s >= choice.predicted.step_s * (1 - WORTH_IT):
        return choice
    return replace(choice, placement=whole, predicted=predicted)


def _candidates(number: int) -> Iterator[int]:
    """0 (parameters first) and up to ``number`` (states first) in a few even steps."""
    steps = min(number, MAX_CANDIDATES - 1, MAX_COMPARED // max(number, 1))
    yield from dict.fromkeys([0, *(round(number * index / steps) for index in range(1, steps + 1))]) if steps else [0]


# -- the explanation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What a change would give: the predicted step, and how many times as much is trained per second."""

    change: str
    step_s: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a placement is as it is: plain data that prints itself."""

    homes: Mapping[str, int]
    """Segments by "param on X, state on Y"."""
    predicted: Mapping[str, Any]
    slack: Mapping[str, float]
    """Share of the step in which each channel is idle; the smallest one binds, unless even that is over LATENCY_BOUND."""
    binding: str
    reasons: Sequence[str]
    alternatives: Sequence[Alternative]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "homes": dict(self.homes),
            "predicted": dict(self.predicted),
            "slack": dict(self.slack),
            "binding": self.binding,
            "reasons": list(self.reasons),
            "alternatives": [vars(alternative) for alternative in self.alternatives],
        }

    def __str__(self) -> str:
        lines = [f"{number} segment{'s' * (number != 1)}: {where}" for where, number in self.homes.items()]
        lines.append(
            f"predicted step: {self.predicted['step_s']:.3f} s, {self.predicted['ratio']:.2f} times its lower bound of "
            f"{self.predicted['lower_bound_s']:.3f} s"
        )
        idle = ", ".join(
            f"{LINK_WORDS.get(name, name)} is idle {share:.0%}"
            for name, share in self.slack.items()
            if name != self.binding
        )
        binding, rest = LINK_WORDS.get(self.binding, self.binding), self.slack[self.binding]
        if rest > LATENCY_BOUND:
            lines.append(f"no link binds, the time of single transfers does: {binding} is idle {rest:.0%}; {idle}")
        else:
            lines.append(f"{binding} binds (idle {rest:.0%}); {idle}")
        lines += [*self.reasons]
        lines += [
            f"with {item.change}: {item.step_s:.3f} s per step, {item.speedup:.2f} times as much trained per second"
            for item in self.alternatives
        ]
        return "\n".join(lines)


def explain(choice: Choice) -> Explanation:
    """Words and figures for a choice. What-ifs that the budgets do not allow are left out."""
    done = choice.predicted
    homes: dict[str, int] = {}
    for segment in choice.question.segments:
        home = choice.placement.homes[segment.name]
        where = f"parameters on {home.param}, optimizer state on {home.state}"
        if home.kept:
            where += f" but for {home.kept / segment.shard_numel:.0%} of it, which is on {home.kept_on}"
        homes[where] = homes.get(where, 0) + 1
    return Explanation(
        homes=homes,
        predicted=done.as_dict(),
        slack={name: idle / done.step_s if done.step_s else 0.0 for name, idle in done.idle_s.items()},
        binding=done.binding,
        reasons=list(_reasons(choice)),
        alternatives=list(_alternatives(choice)),
    )


def _reasons(choice: Choice) -> Iterator[str]:
    placement, question = choice.placement, choice.question
    yield from placement.reasons
    homes, wishes = list(placement.homes.values()), question.wishes
    for what, tiers, shares, chosen in (
        ("parameters", wishes.param_tiers, wishes.param_shares, [home.param for home in homes]),
        ("optimizer state", wishes.state_tiers, wishes.state_shares, [home.state for home in homes]),
    ):
        if shares:
            met = met_shares(question.segments, placement.homes)[what]
            asked = said_shares(dict(shares))
            found = (
                "as asked for"
                if said_shares(met) == asked
                else f"asked for {asked}, this is nearest with whole segments"
            )
            yield f"{what}: {said_shares(met)}, {found}"
        elif len(tiers) == 1:
            yield f"{what} on {tiers[0]}: the configuration says so"
        elif Tier.NVME in chosen:
            yield f"{what} of {chosen.count(Tier.NVME)} of {len(chosen)} segments on nvme: the budgets hold no more"
        else:
            yield f"{what} in memory: the budgets hold them"
    if len(set(choice.tried.values())) > 1:
        usual, taken = choice.tried[0], choice.tried[choice.state_first]
        if choice.state_first:
            yield (
                f"memory goes to optimizer states before parameters: {taken:.3f} s against {usual:.3f} s the other way round"
            )
        else:
            other = min(seconds for first, seconds in choice.tried.items() if first)
            yield f"memory goes to parameters before optimizer states: {usual:.3f} s against {other:.3f} s at best otherwise"


def _alternatives(choice: Choice) -> Iterator[Alternative]:
    question, now = choice.question, choice.predicted.step_s
    for change, other, work in _changes(question):
        try:
            step_s = choose(other).predicted.step_s
        except PlacementError:
            continue
        yield Alternative(change=change, step_s=step_s, speedup=work * now / step_s if step_s else 1.0)


def _changes(question: PlacementQuestion) -> Iterator[tuple[str, PlacementQuestion, float]]:
    """Each change, the question it leads to, and how much more work a step then does."""
    if DISK in question.links.names:
        yield "disks twice as fast", replace(question, links=question.links.faster(DISK, 2.0)), 1.0
    for name, words in (("device_bytes", "device"), ("host_bytes", "host")):
        budget = getattr(question.budgets, name)
        if budget is not None:
            more = replace(question.budgets, **{name: budget * 3 // 2})
            yield f"half as much {words} memory again ({budget * 3 // 2:,} bytes)", replace(question, budgets=more), 1.0
    times = question.times
    larger = replace(
        times,
        forward_s=[2 * seconds for seconds in times.forward_s],
        backward_s=[2 * seconds for seconds in times.backward_s],
    )
    yield "a batch twice as large", replace(question, times=larger), 2.0

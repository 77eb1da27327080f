"""Why a placement is as it is: what lives where, which link binds, what more of anything would give. Pure, over plain data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.tier import Tier

from .choice import Choice, choose
from .placement import PlacementError
from .question import PlacementQuestion
from .shares import met_shares, said_shares

LATENCY_BOUND = 0.75
"""Where even the busiest channel is idle for more than this share of a step, what is waited for is single transfers; phases
in which one channel after the other binds leave the busiest one less idle than that."""
LINK_WORDS = {DISK: "the disk", "host->device": "the way to the device", "compute": "compute"}


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
        idle = f"; {idle}" if idle else ""
        binding, rest = LINK_WORDS.get(self.binding, self.binding), self.slack[self.binding]
        if rest > LATENCY_BOUND:
            lines.append(f"no link binds, the time of single transfers does: {binding} is idle {rest:.0%}{idle}")
        else:
            lines.append(f"{binding} binds (idle {rest:.0%}){idle}")
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
        if home.late:
            where += ", updated under the next forward pass"
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
    yield from _order_of_memory(choice)


def _order_of_memory(choice: Choice) -> Iterator[str]:
    """What was compared with the usual order of giving out memory, if anything."""
    question, taken = choice.question, choice.predicted.step_s
    if taken < choice.usual_s:
        usual, found = (met_shares(question.segments, p.homes) for p in (question.place(), choice.placement))
        more = {what: found[what].get(Tier.NVME, 0.0) - usual[what].get(Tier.NVME, 0.0) for what in usual}
        swapped = more["optimizer state"] < 0 < more["parameters"]
        what = (
            "optimizer states before parameters" if swapped else "other segments than those at the front of the model"
        )
        late = sum(home.late for home in choice.placement.homes.values())
        if late:
            what = f"gradients of {late} segments, so that their updates run under the next forward pass"
        yield f"memory goes to {what}: {taken:.3f} s against {choice.usual_s:.3f} s the usual way round"
    elif choice.other_s is not None:
        yield (
            f"memory goes to parameters before optimizer states, the front of the model first: {taken:.3f} s against "
            f"{choice.other_s:.3f} s at best otherwise"
        )


def _alternatives(choice: Choice) -> Iterator[Alternative]:
    question, now = choice.question, choice.predicted.step_s
    for change, other, work in _changes(question):
        try:
            step_s = choose(other, present=choice.placement.homes).predicted.step_s
        except PlacementError:
            continue
        yield Alternative(change=change, step_s=step_s, speedup=work * now / step_s if step_s else 1.0)


def _changes(question: PlacementQuestion) -> Iterator[tuple[str, PlacementQuestion, float]]:
    """Each change, the question it leads to, and how much more work a step then does."""
    if DISK in question.links.names:
        more = question.disks + 1
        one_more = "" if question.disks > 1 else " (or one more like it)"
        yield f"disks twice as fast{one_more}", replace(question, links=question.links.faster(DISK, 2.0)), 1.0
        if question.disks > 1:
            links = question.links.faster(DISK, more / question.disks)
            yield f"one more disk like these ({more} in all)", replace(question, links=links, disks=more), 1.0
    for name, tier in (("device_bytes", Tier.DEVICE), ("host_bytes", Tier.HOST)):
        budget = getattr(question.budgets, name)
        if budget is not None:
            budgets = replace(question.budgets, **{name: budget * 3 // 2})
            words = f"half as much {tier} memory again ({budget * 3 // 2:,} bytes)"
            yield words, replace(question, budgets=budgets), 1.0
    times = question.times
    larger = replace(
        times,
        forward_s=[2 * seconds for seconds in times.forward_s],
        backward_s=[2 * seconds for seconds in times.backward_s],
    )
    wishes = replace(question.wishes, saved_input_bytes=2 * question.wishes.saved_input_bytes)
    yield "a batch twice as large", replace(question, times=larger, wishes=wishes), 2.0

"""The placement whose simulated step is shortest. Pure.

Several orders in which memory can be given out are placed and simulated. Of few segments, all assignments of homes that may be
better are, too, and the best divided in other ways; of many, the best is bettered by serving single claims first or last, as
long as that helps.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lamina.tiers.simulation.simulate import Simulation
from lamina.tiers.tier import Tier

from .bounds import least_seconds
from .enumeration import Enumeration
from .homes import Home
from .order import USUAL, Claim, Order, states_first
from .placement import Placement, PlacementError
from .question import PlacementQuestion

MAX_LOOKED_AT = 1500
"""Segments times placements: the choice is made while users wait."""
FEW = 6
"""Segments of which all assignments of homes are looked at."""
STATES_FIRST = 8
"""How many orders give the states of a part of the model memory first."""
WORTH_IT = 0.005
"""Another candidate must be this much faster, as a share, to be taken instead of the usual one."""
WORTH_SEEKING = 0.03
"""Of all assignments, those are looked at that may be this much faster than the best; MAX_ASSIGNMENTS at most."""
MAX_ASSIGNMENTS = 40
LATE_COUNTS = (1, 2, 3, 4, 6)
"""So many updates are tried to be late."""
LATE_SKIPPED = (0, 2)
"""So many of those whose gradients are final first are not: else the disk has nothing to do until the others' are."""
FEW_DIVIDED = 3
"""States of which all are divided at a time."""
QUARTERS = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement and its predicted step.

    ``usual_s`` is what the usual order of memory would take (parameters first, the front of the model first), ``other_s`` the
    least that any other was found to take; None where none was simulated."""

    question: PlacementQuestion
    placement: Placement
    predicted: Simulation
    usual_s: float
    other_s: float | None = None

    @classmethod
    def given(cls, question: PlacementQuestion, placement: Placement) -> "Choice":
        """No choice: what is predicted for a placement that something else decided."""
        predicted = question.predict(placement)
        return cls(question=question, placement=placement, predicted=predicted, usual_s=predicted.step_s)


def choose(question: PlacementQuestion, *, present: Mapping[str, Home] | None = None) -> Choice:
    """The best of the placements that there is time to look at; of few segments, of all.

    The usual order is kept unless another is clearly faster. ``present``: homes that are looked at, too, where the budgets hold
    them. Raises PlacementError when the budgets cannot work.
    """
    if not question.segments:
        raise PlacementError("no segments to place")
    search = _Search(question)
    if question.placer.settled is None:
        if present is not None and question.placer.holds(present):
            search.look_at([(USUAL, question.placer.place_at(present))])
        search.look_at(search.ordered(_starts(question)))
        if len(question.segments) <= FEW:
            search.look_at_all()
        else:
            while search.look_at(search.ordered(_neighbours(question, search.order))):
                pass
        search.look_at((order, question.place(order)) for order in _with_late_updates(question, search.order))
    return search.outcome()


class _Search:
    """The best placement so far, the order of memory that it is the outcome of, and what there is still time for."""

    def __init__(self, question: PlacementQuestion) -> None:
        self._question = question
        self._best = Choice.given(question, question.place())
        self._others: list[float] = []
        self._seen = {tuple(self._best.placement.homes.values())}
        self._left = MAX_LOOKED_AT // len(question.segments) - 1
        self.order = USUAL

    def _faster(self, share: float) -> float:
        """Seconds of a step that is faster than the best by a share."""
        return self._best.predicted.step_s * (1 - share)

    def ordered(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Placement]]:
        """Placements in as many of these orders as there is time for."""
        for order in itertools.islice(orders, max(self._left, 0)):
            self._left -= 1
            yield order, self._question.place(order)

    def look_at(self, placements: Iterable[tuple[Order, Placement]]) -> bool:
        """Whether one of these is better than the best. Simulated, the most promising first, is only what can be."""
        question, better = self._question, False
        bounds = []
        for number, (order, placement) in enumerate(placements):
            homes = tuple(placement.homes.values())
            if homes not in self._seen:
                self._seen.add(homes)
                bounds.append((least_seconds(question.step(placement), question.links), number, order, placement))
        for bound, _, order, placement in sorted(bounds, key=lambda entry: entry[:2]):
            if bound >= self._faster(WORTH_IT):
                break
            predicted = question.predict(placement)
            self._others.append(predicted.step_s)
            if predicted.step_s < self._faster(WORTH_IT):
                self._best, self.order, better = (
                    replace(self._best, placement=placement, predicted=predicted),
                    order,
                    True,
                )
        return better

    def look_at_all(self) -> None:
        """Every assignment of homes that may be better, the most promising first, with the memory that it leaves given to part of
        the first state or, in the best of them, to part of any."""
        question, placer = self._question, self._question.placer
        indices = range(len(question.segments)) if question.wishes.divide_state else range(0)
        wanted_s = self._faster(WORTH_SEEKING)
        both = (Enumeration(question, wanted_s, spared=tier) for tier in (Tier.DEVICE, Tier.HOST))
        promising = sorted(itertools.chain(*both), key=lambda entry: entry[0])
        best = None
        for bound, homes in promising[:MAX_ASSIGNMENTS]:
            if bound >= self._faster(WORTH_SEEKING):
                break
            ways = [
                placer.place_at(homes),
                *(placer.place_at(homes, divide=indices, slow_first=s) for s in (False, True)),
            ]
            best = homes if self.look_at((USUAL, placement) for placement in ways) else best
        if best is not None:
            ways = [
                placer.place_at(best, divide=[*indices[first:], *indices[:first]], slow_first=slow_first)
                for first in indices[1:]
                for slow_first in (False, True)
            ]
            self.look_at((USUAL, placement) for placement in ways)
        self.look_at((USUAL, placement) for placement in self._divided_otherwise())

    def _divided_otherwise(self) -> Iterator[Placement]:
        """The best, but with several states divided: all but one keep quarters in memory, that one what is left of it. Smaller
        turns then take place beside what is computed of states in memory."""
        question, homes = self._question, dict(self._best.placement.homes)
        wishes, chunk = question.wishes, question.wishes.chunk_numel
        memory_and_nvme = len(wishes.state_tiers) > 1 and wishes.state_tiers[-1] is Tier.NVME
        free = [s for s in question.segments if s.trained and homes[s.name].param is not Tier.NVME]
        free = [s for s in free if s.name not in question.fixed and not wishes.state_shares]
        if not (wishes.divide_state and memory_and_nvme and 1 < len(free) <= FEW_DIVIDED):
            return
        memory = {s.name: _memory_of(homes[s.name], wishes.state_tiers[-2]) for s in free}
        for filled in free:
            others = [s for s in free if s is not filled]
            for parts in itertools.product(QUARTERS, repeat=len(others)):
                changed = {filled.name: replace(homes[filled.name], state=Tier.NVME, kept=0)}
                for s, part in zip(others, parts, strict=True):
                    kept = int(part * s.shard_numel) // chunk * chunk
                    changed[s.name] = replace(homes[s.name], state=Tier.NVME, kept=kept, kept_on=memory[s.name])
                if question.placer.holds(homes | changed):
                    yield question.placer.place_at(homes | changed, divide=[question.segments.index(filled)])

    def outcome(self) -> Choice:
        """The best of all."""
        return replace(self._best, other_s=min(self._others, default=None))


def _memory_of(home: Home, otherwise: Tier) -> Tier:
    """Where a state is in memory, or may be where it is not."""
    return otherwise if home.front_tier is Tier.NVME else home.front_tier


def _starts(question: PlacementQuestion) -> Iterator[Order]:
    """Orders by what saves most: from the front or the back of the model, large or small segments first, states or parameters."""
    trained = [index for index, s in enumerate(question.segments) if s.trained]
    steps = min(len(trained), STATES_FIRST)
    for index in range(1, steps + 1):
        yield states_first(trained[: round(len(trained) * index / steps)])
    yield Order(divide=False)
    large = sorted(range(len(question.segments)), key=lambda index: -question.segments[index].shard_numel)
    for segments in (large, large[::-1], range(len(large))[::-1]):
        yield Order(first=tuple(Claim(index, state) for state in (False, True) for index in segments))
        yield states_first(segments)


def _with_late_updates(question: PlacementQuestion, order: Order) -> Iterator[Order]:
    """An order with some of the updates late whose gradients are final first: a forward pass uses them last."""
    late = [i for i in reversed(range(len(question.segments))) if question.placer.may_be_late(question.segments[i])]
    for skipped in LATE_SKIPPED:
        for count in (count for count in LATE_COUNTS if skipped + count <= len(late)):
            yield replace(order, late=tuple(late[skipped : skipped + count]))


def _neighbours(question: PlacementQuestion, order: Order) -> Iterator[Order]:
    """An order with one segment's claims moved to the front or to the end, and what else can be changed in it."""
    for window in (1, 2, 3):
        if window != order.window:
            yield replace(order, window=window)
    yield replace(order, divide=not order.divide)
    params, states = question.wishes.param_tiers[:-1], question.wishes.state_tiers[:-1]
    for index, s in enumerate(question.segments):
        for tier in params:
            yield order.with_first(Claim(index, False, tier))
            for other in states if s.trained else ():
                yield order.with_first(Claim(index, False, tier), Claim(index, True, other))
        if s.trained:
            yield order.with_last(Claim(index, True))
        yield order.with_last(Claim(index, False), Claim(index, True))

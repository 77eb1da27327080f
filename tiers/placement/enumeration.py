"""Every assignment of homes to a few segments that may be better than what is known already. Pure.

Segment by segment, homes are given up as soon as those of the segments so far take more memory than there is, or more time than
is wanted even if all others took none. The largest come first: no other may take a tier's memory from them.
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from lamina.tiers.tier import Tier

from .bounds import Bound, Load, load_of_updates
from .homes import Home, SegmentSize
from .question import PlacementQuestion
from .segment_needs import SegmentNeeds, segment_needs

MAX_NODES = 20_000
"""Partial assignments that are looked at: a fraction of a second."""

Kind = tuple[bool, bool, bool]
"""What homes have in common that differ in nothing but in which memory is taken."""


class _Option(NamedTuple):
    """One segment at one home."""

    home: Home
    needs: SegmentNeeds
    load: Load
    kind: Kind


class Enumeration:
    """Iterates over assignments that the budgets hold and whose step may take less than ``wanted_s``, each with the least that it
    may take.

    Of those that differ only in which memory is taken, one: parameters are not on the tier ``spared``, where they need not be.
    """

    def __init__(self, question: PlacementQuestion, wanted_s: float, *, spared: Tier) -> None:
        self._question = question
        self._wanted_s = wanted_s
        self._segments = sorted(question.segments, key=lambda s: -s.home_bytes)
        self._options = _options(question, self._segments, spared)
        self._nodes = 0
        self._kinds: set[tuple[Kind, ...]] = set()
        budgets, wishes = question.budgets, question.wishes
        self._device = inf if budgets.device_bytes is None else budgets.device_bytes
        self._host = inf if budgets.host_bytes is None else budgets.host_bytes
        step = question.step(question.placer.place_at(question.placer.slowest()))
        self._bound = Bound.of(step, question.links, early=wishes.overlap_update and not wishes.separate_device)
        self._saved = _saved_by_dividing(self._options) if wishes.divide_state else (0.0, 0.0)

    def __iter__(self) -> Iterator[tuple[float, dict[str, Home]]]:
        gradients = sum(min(option.needs.kept_gradient for option in options) for options in self._options)
        yield from self._assign((), 0, gradients, Load(), 0.0)

    def _assign(
        self, chosen: tuple[_Option, ...], device: int, host: int, load: Load, least_s: float
    ) -> Iterator[tuple[float, dict[str, Home]]]:
        if len(chosen) == len(self._options):
            kinds = tuple(option.kind for option in chosen)
            homes = {s.name: option.home for s, option in zip(self._segments, chosen, strict=True)}
            if kinds not in self._kinds and self._question.placer.holds(homes):
                self._kinds.add(kinds)
                yield least_s, homes
            return
        options = self._options[len(chosen)]
        counted = min(option.needs.kept_gradient for option in options)
        for option in options:
            self._nodes += 1
            more_device = device + option.needs.device_params + option.needs.device_state
            more_host = host + option.needs.host_params + option.needs.host_state + option.needs.kept_gradient - counted
            if self._nodes > MAX_NODES or more_device > self._device or more_host > self._host:
                continue
            more = load.plus(option.load)
            then = (*chosen, option)
            window = max(one.needs.fetched for one in then) if more.fetched else 0
            least_s = self._least_s(more, self._device - more_device, self._host - more_host, window)
            if least_s < self._wanted_s:
                yield from self._assign(then, more_device, more_host, more, least_s)

    def _least_s(self, load: Load, free_device: float, free_host: float, window: int) -> float:
        """With so many bytes free, of which fetched groups can have those of the device tier, and divided states what the window
        and the update buffers leave."""
        missing = max(0.0, load.fetched - free_device)
        free = max(0.0, free_device - window) + max(
            0.0, free_host - (self._question.placer.staging if load.written else 0)
        )
        read, written = self._saved
        least = load._replace(
            read=max(0.0, load.read - read * free) if read else load.read,
            written=max(0.0, load.written - written * free) if written else load.written,
            fetched=self._bound.passes * missing,
            up=self._bound.passes * min(missing, load.up) if load.up else 0.0,
        )
        return self._bound.seconds(least)


def _options(question: PlacementQuestion, segments: list[SegmentSize], spared: Tier) -> list[list[_Option]]:
    """Of each segment, those first that leave least to do; of these, those whose parameters spare a tier."""
    found: list[list[_Option]] = [[] for _ in segments]
    slowest = question.placer.slowest()
    everywhere = {home: None for s in segments for home in _homes(question, s, slowest[s.name])}
    for home in everywhere:
        at = {
            s.name: home if home in _homes(question, s, slowest[s.name]) else slowest[s.name] for s in question.segments
        }
        updates = question.step(question.placer.place_at(at)).updates
        for s, options in zip(segments, found, strict=True):
            if at[s.name] == home:
                needs = segment_needs(s, home, question.wishes)
                load = load_of_updates(tuple(update for update in updates if update.name == s.name))
                fetched = needs.fetched if home.param is Tier.NVME else 0
                options.append(_Option(home, needs, load._replace(fetched=fetched), _kind(question, home)))
    return [sorted(options, key=lambda o: (o.load.read + o.load.fetched, o.home.param is spared)) for options in found]


def _homes(question: PlacementQuestion, s: SegmentSize, slowest: Home) -> list[Home]:
    """Where a segment can live, as a whole."""
    wishes = question.wishes
    if s.name in question.fixed:
        return [slowest]
    params = (slowest.param,) if s.persistent or wishes.param_shares else wishes.param_tiers
    states = (slowest.state,) if not s.trained or wishes.state_shares else wishes.state_tiers
    return [
        slowest if slowest.state is state and slowest.param is param else Home(param=param, state=state)
        for param in params
        for state in states
        if param is not Tier.NVME or state is slowest.state
    ]


def _kind(question: PlacementQuestion, home: Home) -> Kind:
    in_place = home.param in question.wishes.in_place_tiers
    return in_place, home.param is Tier.NVME, home.state is Tier.NVME


def _saved_by_dividing(options: list[list[_Option]]) -> tuple[float, float]:
    """Bytes of reads and of writes that a byte of memory saves at most, where it is given to part of a state."""
    whole = [(o.load, s) for segment in options for o in segment for s in segment if _differ_in_state(o, s)]
    ratios = [
        (load.read / size, load.written / size)
        for load, o in whole
        if (size := o.needs.device_state + o.needs.host_state)
    ]
    return max((read for read, _ in ratios), default=0.0), max((written for _, written in ratios), default=0.0)


def _differ_in_state(slow: _Option, fast: _Option) -> bool:
    same = slow.home.param is fast.home.param is not Tier.NVME
    return same and slow.home.state is Tier.NVME and fast.home.state is not Tier.NVME

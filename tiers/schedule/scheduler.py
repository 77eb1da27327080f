"""Which groups to fetch and which to evict: pure decisions over plain data, no clock, no I/O.

The trace is known, so the choice of victim can be Belady's: evict what is used furthest in the future.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations

from .plan import Action, Verb
from .trace import NEVER, Upcoming

MAX_COMPARED = 5
"""Victims of unequal sizes that are compared in all combinations."""

__all__ = ["NEVER", "DeviceState", "Scheduler"]


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What the device tier holds at the moment of a decision.

    ``held`` maps a group to its bytes (fetching ones included), ``busy`` are the groups that may not be evicted
    (in use, or still being fetched), ``capacity_bytes`` is the whole window.
    """

    held: Mapping[int, int]
    busy: AbstractSet[int]
    capacity_bytes: int
    current: int = -1  # the group in use, which will be idle at the next access

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(self.held.values())


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Prefetches in trace order as far as the window allows, ``lookahead`` accesses at most."""

    sizes: Sequence[int]  # bytes of each group's fetched parameters
    lookahead: int

    def victims(self, state: DeviceState, upcoming: Sequence[int], wanted: int, first_use: int) -> list[int] | None:
        """The groups to evict so that ``wanted`` more bytes fit: those used furthest from now, or cheaper ones.

        Only groups whose next use lies beyond ``first_use`` (a distance in accesses) are given up. None when that
        is not enough. ``upcoming`` must reach as far as the caller can see.
        """
        missing = wanted - state.free_bytes
        if missing <= 0:
            return []
        next_use = _next_uses(upcoming)
        candidates = sorted(
            (group for group in state.held if group not in state.busy and next_use(group) > first_use),
            key=lambda group: (-next_use(group), group),
        )
        chosen: list[int] = []
        for group in candidates:
            chosen.append(group)
            missing -= state.held[group]
            if missing <= 0:
                return self._cheapest(state, chosen, candidates, missing, next_use)
        return None

    def _cheapest(
        self,
        state: DeviceState,
        furthest: list[int],
        candidates: Sequence[int],
        spare: int,
        next_use: Callable[[int], int],
    ) -> list[int]:
        """Of the sets of victims that free enough, the one that costs the fewest bytes to fetch again.

        Groups of one size: ``furthest``, Belady's choice. Else a small group that is used sooner may be the better victim than
        a large one used later; sets of the furthest few are compared. What is not used again costs nothing.
        """
        few = candidates[: max(len(furthest), MAX_COMPARED)][-MAX_COMPARED:]
        if len({state.held[group] for group in few}) == 1:
            return furthest
        kept = [group for group in furthest if group not in few]
        needed = sum(state.held[group] for group in furthest) + spare - sum(state.held[group] for group in kept)

        def cost(groups: Sequence[int]) -> tuple[int, int, int]:
            again = [group for group in groups if next_use(group) < NEVER]
            return sum(state.held[group] for group in again), len(again), -sum(next_use(group) for group in again)

        enough = (
            groups
            for number in range(1, len(few) + 1)
            for groups in combinations(few, number)
            if sum(state.held[group] for group in groups) >= needed
        )
        return [*kept, *min(enough, key=cost, default=tuple(group for group in furthest if group in few))]

    def _cheaper_later(
        self,
        now: DeviceState,
        current: int,
        upcoming: Sequence[int],
        group: int,
        distance: int,
        chosen: Sequence[int],
    ) -> bool:
        """Whether to wait with an eviction, for a group that is not the next one used.

        It costs more to fetch again than what it makes room for, or less would be lost once the group in use is idle.
        """
        if not chosen:
            return False
        next_use = _next_uses(upcoming)
        if self._again(now, chosen, next_use) > self.sizes[group]:
            return True
        later = DeviceState(held=now.held, busy=now.busy - {current}, capacity_bytes=now.capacity_bytes)
        then = self.victims(later, upcoming, self.sizes[group], distance)
        return then is not None and self._again(later, then, next_use) < self._again(now, chosen, next_use)

    @staticmethod
    def _again(state: DeviceState, groups: Sequence[int], next_use: Callable[[int], int]) -> int:
        """Bytes that are fetched again once these are evicted."""
        return sum(state.held[group] for group in groups if next_use(group) < NEVER)

    def prefetch(self, state: DeviceState, upcoming: Sequence[int], *, reach: int | None = None) -> list[Action]:
        """EVICT and FETCH actions to issue now, most urgent first. ``reach``: later accesses need no fetch yet (lookahead.py);
        None where that is not known, so that fetches are issued as early as they can be."""
        far = self.lookahead if reach is None else min(self.lookahead, reach)
        held = dict(state.held)
        busy = set(state.busy)
        actions: list[Action] = []
        for distance, group in enumerate(upcoming[:far]):
            if group in held or self.sizes[group] == 0:
                continue
            now = DeviceState(held=held, busy=busy, capacity_bytes=state.capacity_bytes)
            chosen = self.victims(now, upcoming, self.sizes[group], distance)
            if chosen is None or (
                distance and self._cheaper_later(now, state.current, upcoming, group, distance, chosen)
            ):
                break
            for victim in chosen:
                del held[victim]
                actions.append(Action(Verb.EVICT, victim))
            held[group] = self.sizes[group]
            busy.add(group)
            actions.append(Action(Verb.FETCH, group))
        return actions


def _next_uses(upcoming: Sequence[int]) -> Callable[[int], int]:
    if isinstance(upcoming, Upcoming):
        return upcoming.next_use
    first: dict[int, int] = {}
    for distance, group in enumerate(upcoming):
        first.setdefault(group, distance)
    return lambda group: first.get(group, NEVER)

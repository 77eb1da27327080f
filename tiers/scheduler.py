"""Which groups to fetch and which to evict: pure decisions over plain data, no clock, no I/O.

The trace is known, so the choice of victim can be Belady's: evict what is used furthest in the future.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .plan import Action, Verb
from .trace import NEVER, Upcoming

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

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(self.held.values())


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Prefetches in trace order as far as ``lookahead`` accesses and the window allow."""

    sizes: Sequence[int]  # bytes of each group's fetched parameters
    lookahead: int

    def victims(self, state: DeviceState, upcoming: Sequence[int], wanted: int, first_use: int) -> list[int] | None:
        """The groups to evict so that ``wanted`` more bytes fit, furthest next use first.

        Only groups whose next use lies beyond ``first_use`` (a distance in accesses) are given up. None when that
        is not enough. ``upcoming`` must reach as far as the caller can see.
        """
        missing = wanted - state.free_bytes
        if missing <= 0:
            return []
        next_use = _next_uses(upcoming)
        candidates = sorted(
            (group for group in state.held if group not in state.busy),
            key=lambda group: (-next_use(group), group),
        )
        chosen: list[int] = []
        for group in candidates:
            if next_use(group) <= first_use:
                break
            chosen.append(group)
            missing -= state.held[group]
            if missing <= 0:
                return chosen
        return None

    def prefetch(self, state: DeviceState, upcoming: Sequence[int]) -> list[Action]:
        """EVICT and FETCH actions to issue now, most urgent first."""
        held = dict(state.held)
        busy = set(state.busy)
        actions: list[Action] = []
        for distance, group in enumerate(upcoming[: self.lookahead]):
            if group in held or self.sizes[group] == 0:
                continue
            now = DeviceState(held=held, busy=busy, capacity_bytes=state.capacity_bytes)
            chosen = self.victims(now, upcoming, self.sizes[group], distance)
            if chosen is None:
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

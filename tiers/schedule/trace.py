"""The access trace: in which order a step uses its groups, and for how long each use computes.

Pure data. The first step records it; every later step walks along it and says when it deviates.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import overload

NEVER = 1 << 60
"""Distance to a use that does not come."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """One use of a group: its index, and the seconds of compute until the next use (0 when not yet known)."""

    group: int
    compute_s: float = 0.0


class Order:
    """Groups in the order of their uses in one step, indexed so that a group's next use is found in O(log uses).

    ``carried``: the groups whose copies outlive the step, so that their uses in the next one count, too.
    """

    def __init__(self, groups: Iterable[int], carried: AbstractSet[int] = frozenset()) -> None:
        self.groups = tuple(groups)
        self.carried = carried
        self._positions: dict[int, list[int]] = {}
        for position, group in enumerate(self.groups):
            self._positions.setdefault(group, []).append(position)

    def distance(self, at: int, group: int) -> int:
        """Uses from position ``at`` until the group's next one, in this step or the next; NEVER when a copy is of no use
        until then."""
        positions = self._positions.get(group, [])
        index = bisect_left(positions, at)
        if index < len(positions):
            return positions[index] - at
        return len(self.groups) - at + positions[0] if positions and group in self.carried else NEVER


class Upcoming(Sequence[int]):
    """The groups of the accesses to come in this step, nearest first: the trace from position ``at`` on.

    It ends with the step: what is fetched for the next one before the update has run would be out of date. Only ``next_use``
    looks beyond, for copies that outlive the step.
    """

    def __init__(self, order: Order, at: int) -> None:
        self._order = order
        self._at = min(max(at, 0), len(order.groups))

    def __len__(self) -> int:
        return len(self._order.groups) - self._at

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._order.groups[self._at + start : self._at + stop : step] if step > 0 else list(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"access {index} of {len(self)} to come")
        return self._order.groups[self._at + index if index >= 0 else index]

    def next_use(self, group: int) -> int:
        """How many accesses from now the group is used, in this step or, carried over, in the next; else NEVER."""
        return self._order.distance(self._at, group)


@dataclass(kw_only=True)
class TraceCursor:
    """Records the first step, then follows it.

    A step that begins again without ``end_step`` (its update was skipped) starts at the front of the trace.

    ``observe(group)`` is called at every access. While recording it appends. While following it advances along
    the recorded order; an access that is not the expected one makes the step *deviant*: the cursor looks for the
    group further on and goes on from there, or, where the step has no such use left, stays where it is (the caller
    fetches on demand either way). A deviant step is recorded beside the old trace and replaces it when the next
    step deviates too, so that one odd step (an evaluation, a skipped layer) does not throw the trace away.
    """

    recorded: list[Access] = field(default_factory=list)
    position: int = -1
    deviant: bool = False
    _this_step: list[Access] = field(default_factory=list)
    _deviant_steps: int = 0
    _order: Order | None = None
    _carried: frozenset[int] = frozenset()

    def carry(self, groups: Iterable[int]) -> None:
        """The groups whose copies outlive a step."""
        self._carried, self._order = frozenset(groups), None

    @property
    def known(self) -> bool:
        return bool(self.recorded)

    def observe(self, group: int, compute_s: float = 0.0) -> None:
        """Note the use of ``group``; ``compute_s`` is the time that the access before it computed."""
        if self._this_step:
            before = self._this_step[-1]
            self._this_step[-1] = Access(group=before.group, compute_s=compute_s)
        if self.known and self.position + 1 == len(self.recorded) and group == self.recorded[0].group:
            self.end_step(compute_s)
        self._this_step.append(Access(group=group))
        if not self.recorded:
            return
        expected = self.position + 1
        if expected < len(self.recorded) and self.recorded[expected].group == group:
            self.position = expected
            return
        self.deviant = True
        for index in range(expected, len(self.recorded)):
            if self.recorded[index].group == group:
                self.position = index
                return

    def end_step(self, compute_s: float = 0.0) -> None:
        """Close the step: adopt what was recorded when there is no trace yet or two steps in a row deviated.

        ``compute_s`` is the time that the last access computed.
        """
        if self._this_step:
            self._this_step[-1] = Access(group=self._this_step[-1].group, compute_s=compute_s)
        short = self.position + 1 < len(self.recorded)
        odd = self.known and (self.deviant or (short and bool(self._this_step)))
        self._deviant_steps = self._deviant_steps + 1 if odd else 0
        if self._this_step and (not odd or self._deviant_steps == 2):
            self._adopt(self._this_step, same_order=self.known and not odd)
        self._this_step = []
        self.position = -1
        self.deviant = False

    def _adopt(self, step: list[Access], *, same_order: bool) -> None:
        """Take a step as the trace; where its order is the known one, only the compute times are newer."""
        self.recorded = step
        self._deviant_steps = 0
        if not same_order:
            self._order = None

    @property
    def ahead(self) -> Upcoming:
        """The accesses to come until the end of the step."""
        if self._order is None:
            self._order = Order((access.group for access in self.recorded), self._carried)
        return Upcoming(self._order, self.position + 1)

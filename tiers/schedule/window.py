"""What the window of fetched groups comes to hold: the executor's policy carried out on paper, over sizes alone. Pure.

[Note: two ends] Most groups of a model are blocks of one size. Such blocks lie one beside the other from the window's
beginning, so that any of them has room where another one was, and groups of all other sizes lie at its end: a small one
that is evicted in between would leave a hole which no block fits into.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from math import lcm

from lamina.tiers.memory.freelist import FreeList

from .plan import Verb
from .scheduler import DeviceState, Scheduler
from .trace import Order, Upcoming

STEPS = 3
"""The first one fetches what is asked for, without a trace; the third begins as every later one does."""


def tile_bytes(sizes: Sequence[int]) -> int:
    """The size of which groups have the most bytes in all; the largest such. See [Note: two ends]."""
    return max(((size * number, size) for size, number in Counter(sizes).items()), default=(0, 0))[1]


def window_peak(
    sizes: Sequence[int],
    order: Sequence[int],
    capacity_bytes: int,
    *,
    lookahead: int,
    carried: AbstractSet[int] = frozenset(),
) -> int:
    """The most bytes that fetched groups take of a window at once.

    ``sizes``: bytes of each group. ``order``: the groups of one step as they are used, one use after the other. ``carried``:
    those whose copies outlive a step. Fetches take no time, and are issued as far ahead as ``lookahead`` and the window allow.
    Raises ValueError for a group that is larger than the window.
    """
    window = _Window(sizes, order, capacity_bytes, lookahead, carried)
    for step in range(STEPS):
        window.run(traced=step > 0)
    return window.peak


def shortened(order: Sequence[int], sizes: Sequence[int], capacity_bytes: int, *, lookahead: int) -> list[int]:
    """The same uses without the middle of long rows of equal groups, of which a window of so many bytes never holds both ends:
    what it comes to hold is the same.

    A window that has room for k of a row holds the same ones again, moved on, after k uses, or one more or fewer where a group of
    another size lies beside them. So what is left out is a multiple of all three: else the row would end at another point."""
    uses = Counter(order)
    rows = groupby(dict.fromkeys(order), key=lambda group: (sizes[group], uses[group]))
    left_out: set[int] = set()
    for (size, _), row in rows:
        groups, room = list(row), capacity_bytes // max(size, 1)
        ends = room + lookahead + 2
        middle = max(len(groups) - 2 * ends, 0)
        middle -= middle % lcm(max(room - 1, 1), max(room, 1), room + 1)
        left_out.update(groups[ends : ends + middle])
    return [group for group in order if group not in left_out]


class _Window:
    def __init__(
        self, sizes: Sequence[int], order: Sequence[int], capacity: int, lookahead: int, carried: AbstractSet[int]
    ) -> None:
        self._sizes = sizes
        self._capacity = capacity
        self._order = Order((group for group in order if sizes[group]), carried)
        self._unknown = Order(())
        self._carried = carried
        self._scheduler = Scheduler(sizes=sizes, lookahead=lookahead)
        self._tile = tile_bytes(sizes)
        self._holes = FreeList(capacity)
        self._held: dict[int, int] = {}  # offset of each group
        self._current = -1
        self.peak = 0

    def run(self, *, traced: bool) -> None:
        """One step. Without a trace nobody knows what comes."""
        order = self._order if traced else self._unknown
        for position, group in enumerate(self._order.groups):
            if group == self._current:
                continue
            upcoming = Upcoming(order, position + 1)
            self._current = group
            if group not in self._held:
                self._demand(group, upcoming)
            self._prefetch(upcoming)
        for group in [group for group in self._held if group not in self._carried]:
            self._evict(group)
        self._current = -1
        self._prefetch(Upcoming(self._order, 0))

    def _demand(self, group: int, upcoming: Upcoming) -> None:
        while not self._fetch(group):
            if not self._held:
                raise ValueError(f"a group of {self._sizes[group]:,} bytes, a window of {self._capacity:,}")
            self._evict(max(self._held, key=lambda other: (upcoming.next_use(other), other)))

    def _prefetch(self, upcoming: Upcoming) -> None:
        state = DeviceState(
            held={group: self._sizes[group] for group in self._held},
            busy={self._current},
            capacity_bytes=self._capacity,
            current=self._current,
        )
        for action in self._scheduler.prefetch(state, upcoming) if upcoming else ():
            if action.verb is Verb.EVICT:
                self._evict(action.group)
            elif not self._fetch(action.group):
                return  # fragmented: the demand will come

    def _fetch(self, group: int) -> bool:
        size = self._sizes[group]
        offset = (self._holes.take if size == self._tile else self._holes.take_last)(size, 1)
        if offset is None:
            return False
        self._held[group] = offset
        self.peak = max(self.peak, self._capacity - self._holes.free_bytes)
        return True

    def _evict(self, group: int) -> None:
        self._holes.give(self._held.pop(group), self._sizes[group])

"""The window of fetched groups on paper against the executor itself, and that its blocks lie side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lamina.aio_native import Priority
from lamina.tiers import Arena, Block, Executor, Spans, Tier
from lamina.tiers.memory.freelist import FreeList
from lamina.tiers.memory.sizes import GroupSizes
from lamina.tiers.schedule.window import shortened, tile_bytes, window_peak

PAGE = 4096


class Arrived:
    """A fetch that is over at once."""

    def advance(self) -> None: ...
    def drop(self) -> None: ...
    def wait(self) -> None: ...


@dataclass(kw_only=True)
class Home:
    """A group that is fetched and used, and of which nothing is looked at but its size."""

    name: str
    nbytes: int
    outlives_step: bool = True
    bound: Block | None = field(default=None, init=False)

    def start(self, block: Block, priority: Priority) -> Arrived:
        return Arrived()

    def bind(self, block: Block) -> None:
        self.bound = block

    def keep(self, block: Block, *, renewed: bool) -> Arrived:
        return Arrived()

    def unbind(self) -> None:
        self.bound = None


def executed_peak(
    pages: Sequence[int], order: Sequence[int], capacity: int, lookahead: int, carried: set[int], steps: int = 5
) -> int:
    """The arena's own count over a few steps of the executor."""
    homes = [
        Home(name=f"group {index}", nbytes=size * PAGE, outlives_step=index in carried)
        for index, size in enumerate(pages)
    ]
    with Arena(Tier.DEVICE, capacity * PAGE) as arena:
        executor = Executor(arena=arena, sources=homes, lookahead=lookahead, spans=Spans())
        for _ in range(steps):
            for group in order:
                executor.pin(group)
                executor.unpin(group)
            executor.committed(set(range(len(pages))) - carried, set())
            executor.end_step()
        peak = arena.peak
        executor.close()
    assert peak % PAGE == 0
    return peak // PAGE


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, set[int]]:
    """Sizes, uses, a window that holds any one group, how far ahead is fetched, and what outlives a step."""
    size = st.sampled_from([1, 2, 3, 5, 8, 8, 8, 8])
    pages = draw(st.lists(size, min_size=1, max_size=8))
    there = list(range(len(pages)))
    order = draw(st.sampled_from([[*there, 0], there])) + there[::-1]
    order += draw(st.lists(st.sampled_from(there), max_size=3))
    capacity = draw(st.integers(max(pages), sum(pages) + 2))
    carried = set(there) if draw(st.booleans()) else set(draw(st.lists(st.sampled_from(there))))
    return pages, order, capacity, draw(st.integers(0, 5)), carried


@settings(max_examples=300)
@given(rows())
def test_the_peak_on_paper_is_that_of_the_executor(case: tuple[list[int], list[int], int, int, set[int]]) -> None:
    pages, order, capacity, lookahead, carried = case
    on_paper = window_peak(pages, order, capacity, lookahead=lookahead, carried=carried)
    assert on_paper == executed_peak(pages, order, capacity, lookahead, carried)
    assert max(pages) <= on_paper <= capacity


@example(row=55, size=6, others=[9, 7], capacity=20, lookahead=4)  # leaving out any number ended elsewhere
@given(
    row=st.integers(1, 90),
    size=st.integers(4, 9),
    others=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    capacity=st.integers(20, 60),
    lookahead=st.integers(0, 5),
)
def test_a_long_row_of_equal_groups_comes_to_the_same_as_a_short_one(
    row: int, size: int, others: list[int], capacity: int, lookahead: int
) -> None:
    sizes = [others[0], *([size] * row), others[1]]
    order = [*range(row + 2), 0, *reversed(range(1, row + 2))]
    carried = frozenset(range(len(sizes)))
    short = shortened(order, sizes, capacity, lookahead=lookahead)
    room = capacity // size
    left = 2 * (room + lookahead + 2) + math.lcm(max(room - 1, 1), room, room + 1)
    assert len(short) <= 2 * left + 5
    peaks = [window_peak(sizes, uses, capacity, lookahead=lookahead, carried=carried) for uses in (order, short)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("spare", [0, 90])
def test_a_small_group_between_blocks_leaves_no_hole_that_none_of_them_fits_into(spare: int) -> None:
    """Three blocks and a root group in a window of three blocks: all three lie there while the root is not used."""
    sizes = [100, 2000, 2000, 2000]
    order = [0, 1, 2, 3, 0, 3, 2, 1]
    assert tile_bytes(sizes) == 2000
    assert window_peak(sizes, order, 6000 + spare, lookahead=2, carried=frozenset(range(4))) == 6000


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(
    taken=sizes, given_back=st.lists(st.integers(0, 11)), wanted=st.integers(1, 40), align=st.sampled_from([1, 4, 8])
)
def test_the_last_hole_is_taken_at_its_end(taken: list[int], given_back: list[int], wanted: int, align: int) -> None:
    holes, at = FreeList(160), {}
    for index, nbytes in enumerate(taken):
        offset = holes.take(nbytes, 1)
        if offset is not None:
            at[index] = offset
    for index in dict.fromkeys(given_back):
        if index in at:
            holes.give(at[index], taken[index])
    before = list(holes)
    places = [start for hole, size in before for start in range(hole, hole + size - wanted + 1) if start % align == 0]
    found = holes.take_last(wanted, align)
    assert found == (max(places) if places else None)
    if found is not None:
        holes.give(found, wanted)
    assert list(holes) == before


@given(
    changes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=40),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_largest_runs_follow_every_change(changes: list[tuple[int, int]], lengths: list[int]) -> None:
    sizes, plain = GroupSizes(), dict.fromkeys(range(9), 0)
    for group, nbytes in changes:
        sizes.change(group, nbytes - plain[group])
        plain[group] = nbytes
        row = [size for size in plain.values() if size]
        assert len(sizes) == len(row)
        for length in lengths:
            assert sizes.largest_run(length) == max((sum(row[at : at + length]) for at in range(len(row))), default=0)

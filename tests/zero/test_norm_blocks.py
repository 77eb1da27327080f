"""Blocks of the gradient norm: every element is in one block of its parameter, on whichever ranks that block lies."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.zero.adam.kernels import NORM_BLOCK
from lamina.zero.gradients.norm import exact_terms
from lamina.zero.gradients.norm_blocks import cut_blocks, whole_blocks
from lamina.zero.groups.partition import FlatLayout


def wanted_blocks(layout: FlatLayout) -> list[tuple[int, int]]:
    """First and past-the-last element of every block, counted in the flat layout."""
    return [
        (begin, min(begin + NORM_BLOCK, slot.end))
        for slot in layout.slots
        for begin in range(slot.offset, slot.end, NORM_BLOCK)
    ]


@settings(max_examples=200, deadline=None)
@given(
    numels=st.lists(st.one_of(st.integers(0, 70), st.integers(4000, 4200), st.integers(0, 40_000)), max_size=6),
    world_size=st.integers(1, 9),
)
def test_every_rank_has_whole_blocks_or_parts_of_cut_ones(numels: list[int], world_size: int) -> None:
    layout = FlatLayout.of([(str(index), (numel,)) for index, numel in enumerate(numels)], world_size)
    found: list[tuple[int, int]] = []
    for rank in range(world_size):
        shard = rank * layout.shard_numel
        for slot, first, last in whole_blocks(layout, rank):
            assert (shard + first - layout.slots[slot].offset) % NORM_BLOCK == 0
            assert shard + last <= layout.slots[slot].end
            found += [
                (begin, min(begin + NORM_BLOCK, shard + last))
                for begin in range(shard + first, shard + last, NORM_BLOCK)
            ]
    for block in cut_blocks(layout):
        found.append((block.begin, block.end))
        assert len(block.ranks) > 1
        parts = [(rank * layout.shard_numel, *block.part(rank)) for rank in block.ranks]
        assert [shard + first for shard, first, _ in parts] == [block.begin, *(shard for shard, _, _ in parts[1:])]
        assert [shard + last for shard, _, last in parts] == [*(shard for shard, _, _ in parts[1:]), block.end]
        assert all(last <= layout.shard_numel for _, _, last in parts)
    assert sorted(found) == wanted_blocks(layout)


@given(values=st.lists(st.floats(0, 2.0**127, width=32).map(lambda value: float(value) ** 2), max_size=40))
def test_terms_have_the_exact_sum(values: list[float]) -> None:
    assert sum(map(Fraction, exact_terms(values))) == sum(map(Fraction, values))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    assert str(math.fsum(exact_terms([1.0, value, 2.0]))) == str(value)

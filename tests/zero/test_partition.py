"""The flat layout: slots do not overlap, are aligned, and the shards of all ranks are the whole, once each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.zero.groups.partition import ALIGN_ELEMENTS, FlatLayout

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=10)


@given(shapes=shapes, world_size=st.integers(1, 7))
def test_every_element_belongs_to_exactly_one_rank(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)
    owners: dict[tuple[int, int], int] = {}
    for rank in range(world_size):
        begin, end = layout.shard_range(rank)
        assert end - begin == layout.shard_numel
        for slot, first, last in layout.pieces(rank):
            for element in range(begin + first, begin + last):
                key = (slot, element - layout.slots[slot].offset)
                assert key not in owners
                owners[key] = rank
    assert len(owners) == sum(slot.numel for slot in layout.slots)


@given(shapes=shapes, world_size=st.integers(1, 7))
def test_slots_are_aligned_in_order_and_apart(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.shape == shape
        assert slot.offset % ALIGN_ELEMENTS == 0
        assert slot.offset >= end
        end = slot.end
    assert end <= layout.numel
    assert layout.shard_numel % ALIGN_ELEMENTS == 0


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        FlatLayout.of([("p", (3,))], world_size)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2"):
        FlatLayout.of([("p", (3,))], 2).shard_range(2)

"""Placement: budgets hold, memory is used for what saves most, and a refusal shows sums that are true."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import Budgets, PlacementError, SegmentSize, Tier, Wishes, place

MIB = 1 << 20


def block(index: int, numel: int = MIB, **changes: object) -> SegmentSize:
    values: dict[str, object] = {
        "name": f"block{index}",
        "group": index,
        "full_numel": numel,
        "shard_numel": numel,
        "param_itemsize": 2,
        "state_itemsizes": (2, 4, 4),
        "grad_itemsize": 2,
    }
    return SegmentSize(**(values | changes))  # type: ignore[arg-type]


def test_without_budgets_everything_stays_in_memory() -> None:
    placement = place([block(i) for i in range(4)], Budgets(), Wishes())
    assert {home.param for home in placement.homes.values()} == {Tier.DEVICE}
    assert {home.state for home in placement.homes.values()} == {Tier.HOST}
    assert placement.device_bytes == 4 * 2 * MIB
    assert placement.host_items == {"optimizer state": 4 * 10 * MIB, "gradients": 4 * 2 * MIB}
    assert placement.nvme_bytes == 0
    assert placement.staging_count == 0


def test_pinned_tiers_are_kept_even_where_memory_is_free() -> None:
    wishes = Wishes(param_tiers=(Tier.NVME,), state_tiers=(Tier.NVME,))
    placement = place([block(i) for i in range(4)], Budgets(), wishes)
    assert {(home.param, home.state) for home in placement.homes.values()} == {(Tier.NVME, Tier.NVME)}
    assert placement.nvme_bytes == 2 * 4 * 12 * MIB


def test_parameters_are_kept_in_memory_before_optimizer_states() -> None:
    wishes = Wishes(overlap_update=True, chunk_numel=1 << 15, sub_group_numel=1 << 15)
    staging = 3 * 12 * (1 << 15)
    budgets = Budgets(device_bytes=8 * MIB, host_bytes=6 * MIB + staging + 10 * MIB)
    placement = place([block(i) for i in range(4)], budgets, wishes)
    assert {home.param for home in placement.homes.values()} == {Tier.DEVICE}
    in_memory = [name for name, home in placement.homes.items() if home.state is Tier.HOST]
    assert in_memory == ["block0"], (
        "its state of 10 MiB fits beside its own gradient, two open ones and the update buffers"
    )


def test_a_refusal_names_the_least_that_works_and_that_works() -> None:
    segments = [block(i) for i in range(4)]
    wishes = Wishes(chunk_numel=1 << 15)
    with pytest.raises(PlacementError) as refused:
        place(segments, Budgets(device_bytes=MIB, host_bytes=MIB), wishes)
    text = str(refused.value)
    least = {
        tier: int(value.replace(",", "")) for tier, value in re.findall(r"(device|host)_bytes.*?Write ([\d,]+)", text)
    }
    # Of the gradients, two at a time must fit: the others can go to the scratch file.
    assert least == {"device": 2 * MIB, "host": 2 * 2 * MIB + 3 * 12 * (1 << 15)}
    placement = place(segments, Budgets(device_bytes=least["device"], host_bytes=least["host"]), wishes)
    assert placement.device_bytes <= least["device"]
    assert placement.host_bytes <= least["host"]
    with pytest.raises(PlacementError):
        place(segments, Budgets(device_bytes=least["device"], host_bytes=least["host"] - 1), wishes)
    with pytest.raises(PlacementError):
        place(segments, Budgets(device_bytes=least["device"] - 1, host_bytes=least["host"]), wishes)


@pytest.mark.parametrize("device", [172_032, 400_000])
@pytest.mark.parametrize("state_tiers", [(Tier.DEVICE, Tier.HOST, Tier.NVME), (Tier.HOST, Tier.NVME)])
@pytest.mark.parametrize("gpu", [False, True])
def test_where_update_buffers_are_larger_than_the_states_all_is_kept_in_memory(
    device: int, state_tiers: tuple[Tier, ...], gpu: bool
) -> None:
    segments = [block(0, 85_056, block=False), *(block(index, 320) for index in range(1, 5))]
    in_place = (Tier.DEVICE,) if gpu else (Tier.DEVICE, Tier.HOST)
    wishes = Wishes(state_tiers=state_tiers, separate_device=gpu, in_place_tiers=in_place)
    with pytest.raises(PlacementError) as refused:
        place(segments, Budgets(device_bytes=device, host_bytes=1), wishes)
    least = int(re.search(r"host_bytes.*?Write ([\d,]+)", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    assert least < 1_400_000
    placement = place(segments, Budgets(device_bytes=device, host_bytes=least), wishes)
    assert placement.host_bytes == least
    assert placement.device_bytes <= device
    assert placement.nvme_bytes == 0
    with pytest.raises(PlacementError, match=f"at least {least:,} are needed"):
        place(segments, Budgets(device_bytes=device, host_bytes=least - 1), wishes)


def test_gradients_that_are_used_up_as_they_come_need_room_for_two_blocks_only() -> None:
    segments = [block(i) for i in range(8)] + [block(8, block=False)]
    wishes = Wishes(state_tiers=(Tier.NVME,), overlap_update=True)
    assert place(segments, Budgets(), wishes).host_items["gradients"] == 3 * 2 * MIB
    barrier = Wishes(state_tiers=(Tier.NVME,))
    assert place(segments, Budgets(), barrier).host_items["gradients"] == 9 * 2 * MIB


def test_frozen_segments_keep_only_their_parameters() -> None:
    frozen = block(0, state_itemsizes=(), grad_itemsize=0)
    placement = place([frozen], Budgets(), Wishes(param_tiers=(Tier.NVME,), state_tiers=(Tier.NVME,)))
    assert placement.host_bytes == 0
    assert placement.nvme_items == {"frozen parameters": 2 * MIB}


@given(
    sizes=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=12),
    device=st.integers(1 << 12, 1 << 20),
    host=st.integers(1 << 12, 1 << 21),
    overlap=st.booleans(),
)
def test_budgets_hold_or_the_plan_is_refused_and_more_memory_is_never_refused(
    sizes: list[int], device: int, host: int, overlap: bool
) -> None:
    segments = [block(i, numel) for i, numel in enumerate(sizes)]
    wishes = Wishes(chunk_numel=1 << 10, overlap_update=overlap)
    try:
        placement = place(segments, Budgets(device_bytes=device, host_bytes=host), wishes)
    except PlacementError:
        return
    assert placement.device_bytes <= device
    assert placement.host_bytes <= host
    richer = place(segments, Budgets(device_bytes=2 * device, host_bytes=2 * host), wishes)
    assert richer.device_bytes <= 2 * device
    assert richer.nvme_bytes <= placement.nvme_bytes

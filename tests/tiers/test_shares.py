"""Shares of tiers: met to within a few elements where a state can be divided, elsewhere to the nearest segment."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import Budgets, ComputeTimes, Home, PlacementError, SegmentSize, Tier, Wishes, model_step, place
from lamina.tiers.placement.shares import GRANULE, divided, met_shares, share_params, share_states

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
MIB = 1 << 20


def segment(index: int, numel: int = MIB, **changes: object) -> SegmentSize:
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


def at(segments: list[SegmentSize], param: Tier) -> dict[str, Home]:
    return {s.name: Home(param=param, state=NVME) for s in segments}


def test_the_segment_at_the_border_is_divided_and_the_front_of_the_model_is_on_the_fastest_tier() -> None:
    segments = [segment(index) for index in range(5)]
    shares = ((DEVICE, 0.1), (HOST, 0.4), (NVME, 0.5))
    homes = share_states(segments, at(segments, DEVICE), shares)
    assert [home.state for home in homes.values()] == [HOST, HOST, NVME, NVME, NVME]  # 0.5 of a segment for the device
    assert [home.kept for home in homes.values()] == [0, 0, MIB // 2, 0, 0]
    assert homes["block2"].kept_on is HOST
    assert divided(segments, shares) == segments[2]
    assert met_shares(segments, homes)["optimizer state"] == {HOST: 0.5, NVME: 0.5}


def test_where_parameters_are_on_nvme_whole_segments_come_nearest() -> None:
    segments = [segment(index) for index in range(5)]
    homes = share_states(segments, at(segments, NVME), ((HOST, 0.29), (NVME, 0.71)))
    assert [home.state for home in homes.values()] == [HOST, NVME, NVME, NVME, NVME]
    assert not any(home.kept for home in homes.values())


@given(
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    parts=st.lists(st.integers(0, 10), min_size=3, max_size=3).filter(any),
)
def test_shares_are_met_as_nearly_as_segments_allow(numels: list[int], parts: list[int]) -> None:
    segments = [segment(index, GRANULE * numel) for index, numel in enumerate(numels)]
    total, whole = sum(s.shard_numel for s in segments), sum(parts)
    shares = tuple((tier, part / whole) for tier, part in zip((DEVICE, HOST, NVME), parts, strict=True) if part)
    states = share_states(segments, at(segments, DEVICE), shares)
    params = share_params(segments, at(segments, DEVICE), shares)
    largest = max(numels) * GRANULE
    for tier, part in zip((DEVICE, HOST, NVME), parts, strict=True):
        wanted = Fraction(part, whole) * total
        found = sum(states[s.name].state_numel(s, tier) for s in segments)
        assert abs(found - wanted) <= (GRANULE if tier is NVME else largest + GRANULE)
        assert abs(sum(s.shard_numel for s in segments if params[s.name].param is tier) - wanted) <= largest
    assert sum(sum(states[s.name].state_numel(s, tier) for s in segments) for tier in Tier) == total


def test_given_shares_are_placed_whatever_else_memory_could_hold() -> None:
    segments = [segment(index) for index in range(4)]
    wishes = Wishes(state_tiers=(HOST, NVME), state_shares=((HOST, 0.4), (NVME, 0.6)))
    placed = place(segments, Budgets(), wishes)
    assert [(home.param, home.state) for home in placed.homes.values()] == [(DEVICE, HOST), *[(DEVICE, NVME)] * 3]
    kept = round(0.6 * MIB / GRANULE) * GRANULE
    assert placed.homes["block1"].kept == kept
    pages = sum(-(-kept * itemsize // 4096) * 4096 for itemsize in (2, 4, 4))
    assert placed.host_items["optimizer state"] == 10 * MIB + pages
    with pytest.raises(PlacementError, match=r"nothing in memory beyond the shares of tiers\.placement"):
        place(segments, Budgets(host_bytes=10 * MIB), wishes)


def test_the_divided_segments_parameters_come_to_memory_where_they_are_free_to() -> None:
    segments = [segment(index) for index in range(4)]
    shares = ((HOST, 0.4), (NVME, 0.6))
    wishes = Wishes(state_tiers=(HOST, NVME), state_shares=shares, chunk_numel=1 << 15)
    placed = place(segments, Budgets(device_bytes=3 * MIB, host_bytes=40 * MIB), wishes)
    assert placed.homes["block1"].kept > 0
    assert placed.homes["block1"].param is not NVME
    pinned = Wishes(param_tiers=(NVME,), state_tiers=(HOST, NVME), state_shares=shares)
    assert [home.kept for home in place(segments, Budgets(), pinned).homes.values()] == [0] * 4


def test_a_state_is_divided_only_between_memory_and_nvme_beside_its_parameters() -> None:
    for wrong in ({"param": NVME, "state": NVME}, {"param": HOST, "state": HOST}):
        with pytest.raises(ValueError, match="divided between memory and nvme only"):
            Home(kept=32, **wrong)
    with pytest.raises(ValueError, match="divided between memory and nvme only"):
        Home(param=HOST, state=NVME, kept=32, kept_on=NVME)


def test_the_step_of_a_divided_segment_updates_its_front_last_and_moves_only_the_rest() -> None:
    segments = [segment(index) for index in range(2)]
    wishes = Wishes(
        state_tiers=(HOST, NVME), state_shares=((HOST, 0.25), (NVME, 0.75)), overlap_update=True, chunk_numel=1 << 18
    )
    placed = place(segments, Budgets(), wishes)
    assert placed.homes["block0"].kept == MIB // 2
    times = ComputeTimes(forward_s=[1, 1], backward_s=[1, 1], adam_elements_per_s=MIB)
    step = model_step(segments, placed, times, overlap_update=True, retain_gradients=False)
    early = [update for update in step.updates if update.after is not None]
    (front,) = [update for update in step.updates if update.after is None]
    assert (front.name, front.streams, [part.adam_s for part in front.sub_groups]) == ("block0", False, [0.5])
    moved = {update.name: sum(part.write_bytes for part in update.sub_groups) for update in early}
    assert moved == {"block0": MIB // 2 * 12, "block1": MIB * 12}
    assert {update.name: update.gradient_bytes for update in early} == {"block0": 0, "block1": 2 * MIB}
    assert placed.host_items["gradients"] == 2 * 2 * MIB  # one waits for the step, the other is used up as it comes

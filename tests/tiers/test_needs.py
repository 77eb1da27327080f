"""The sums behind a placement, kept up to date move by move, against sums taken anew; and the search against a plain one."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from plain_placement import PlainNeeds, PlainSearch

from lamina.tiers import Budgets, Claim, Home, Order, PlacementError, SegmentSize, Tier, Wishes, place
from lamina.tiers.placement.needs import Needs, staging_bytes

TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)


@st.composite
def segments(draw: st.DrawFn) -> list[SegmentSize]:
    found = []
    for index in range(draw(st.integers(1, 7))):
        ranks, trained = draw(st.sampled_from([1, 2])), draw(st.integers(0, 4)) > 0
        shard = 32 * draw(st.integers(0, 300))
        found.append(
            SegmentSize(
                name=f"segment {index}",
                group=draw(st.integers(max(0, index - 1), index)),
                full_numel=ranks * shard,
                shard_numel=shard,
                param_itemsize=2,
                state_itemsizes=(2, 4, 4) if trained else (),
                grad_itemsize=2 if trained else 0,
                bucket_itemsize=2 if ranks > 1 else 0,
                replicated=draw(st.booleans()),
                persistent=draw(st.integers(0, 5)) == 0,
                block=draw(st.booleans()),
            )
        )
    return found


wishes = st.builds(
    Wishes,
    overlap_update=st.booleans(),
    retain_gradients=st.booleans(),
    separate_device=st.booleans(),
    saved_input_bytes=st.sampled_from([0, 5000]),
    in_place_tiers=st.sampled_from([(), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)]),
    divide_state=st.booleans(),
    chunk_numel=st.just(1 << 10),
    sub_group_numel=st.just(1 << 10),
)
together = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), max_size=5)


@st.composite
def home(draw: st.DrawFn, segment: SegmentSize) -> Home:
    param = Tier.DEVICE if segment.persistent else draw(st.sampled_from(TIERS))
    state = draw(st.sampled_from(TIERS))
    if state is Tier.NVME and param is not Tier.NVME and segment.trained and segment.shard_numel > 32:
        kept = 32 * draw(st.integers(0, segment.shard_numel // 32 - 1))
        return Home(param=param, state=state, kept=kept, kept_on=draw(st.sampled_from(TIERS[:2])))
    return Home(param=param, state=state)


@given(data=st.data(), sizes=segments(), wanted=wishes, used=together)
def test_sums_that_follow_moves_are_those_taken_anew(
    data: st.DataObject, sizes: list[SegmentSize], wanted: Wishes, used: list[list[int]]
) -> None:
    homes = {s.name: data.draw(home(s)) for s in sizes}
    needs = Needs(segments=sizes, homes=homes, wishes=wanted, together=used)
    for step in range(4):
        plain = PlainNeeds(segments=sizes, homes=homes, wishes=wanted, together=used)
        assert needs.homes == homes
        for window in (1, 2, len(sizes)):
            assert sum(needs.device_items(window).values()) == plain.device(window)
        assert sum(needs.host_items(777).values()) == plain.host(777)
        assert sum(needs.nvme_items().values()) == plain.nvme()
        assert needs.window_sizes() == sorted(plain.fetched().values(), reverse=True) or 0 in plain.fetched().values()
        assert needs.device_bytes(1) == plain.device(1)
        assert needs.host_bytes(777) == plain.host(777)
        if step < 3:
            needs = needs.copy()
            moved = data.draw(st.sampled_from(sizes))
            before, homes[moved.name] = homes[moved.name], data.draw(home(moved))
            assert needs.move(moved, homes[moved.name]) == before


@st.composite
def orders(draw: st.DrawFn, segments: int) -> Order:
    named = draw(st.permutations([(index, state) for index in range(segments) for state in (False, True)]))
    claims = [Claim(*what, draw(st.sampled_from([None, *TIERS]))) for what in named]
    first = draw(st.integers(0, len(claims)))
    last = draw(st.integers(first, len(claims)))
    return Order(
        first=tuple(claims[:first]),
        last=tuple(claims[last:]),
        window=draw(st.integers(1, 3)),
        divide=draw(st.booleans()),
    )


@settings(max_examples=200)
@given(
    sizes=segments(),
    wanted=wishes,
    used=together,
    device=st.integers(0, 400_000),
    host=st.integers(0, 600_000),
    data=st.data(),
)
def test_the_search_agrees_with_one_that_takes_every_sum_anew(
    data: st.DataObject, sizes: list[SegmentSize], wanted: Wishes, used: list[list[int]], device: int, host: int
) -> None:
    budgets = Budgets(device_bytes=device, host_bytes=host)
    order = data.draw(orders(len(sizes)))
    try:
        placed = place(sizes, budgets, wanted, together=used, order=order)
    except PlacementError:
        return
    if placed.scratch_bytes:
        return
    search = PlainSearch(
        segments=sizes,
        budgets=budgets,
        wishes=wanted,
        sub_group=placed.sub_group_numel,
        together=used,
        order=order,
    )
    assert placed.homes == search.homes()
    assert placed.device_bytes <= device
    assert placed.host_bytes <= host
    plain = PlainNeeds(segments=sizes, homes=placed.homes, wishes=wanted, together=used)
    assert placed.host_bytes == plain.host(staging_bytes(sizes, wanted, placed.sub_group_numel))
    assert placed.nvme_bytes == plain.nvme()


def test_placing_takes_time_in_proportion_to_the_groups() -> None:
    def seconds(number: int) -> float:
        sizes = [
            SegmentSize(
                name=f"block {index}",
                group=index,
                full_numel=1 << 20,
                shard_numel=1 << 20,
                param_itemsize=2,
                state_itemsizes=(2, 4, 4),
                grad_itemsize=2,
            )
            for index in range(number)
        ]
        used = [[0, index] for index in range(number)]
        budgets = Budgets(device_bytes=number * 3 << 19, host_bytes=number * 6 << 20)
        began = time.process_time()
        placed = place(sizes, budgets, Wishes(), together=used)
        assert 0 < sum(found.state is Tier.HOST for found in placed.homes.values()) < number
        return time.process_time() - began

    # Eight times the groups: 8 to 10 times the time where sums are kept up to date, 64 times where they are taken anew.
    assert min(seconds(2000) for _ in range(2)) < 28 * max(seconds(250) for _ in range(3))

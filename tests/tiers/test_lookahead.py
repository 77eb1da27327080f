"""Fetches that are issued just early enough: the policy by hand, never late in the worst order of things, and what it gives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_links import MIB, links

from lamina.tiers import Access, BandwidthModel, GroupModel, StepModel, SubGroup, UpdateModel, simulate
from lamina.tiers.links.bandwidth import DISK, TO_DEVICE
from lamina.tiers.schedule.lookahead import HEADROOM, EarlyUpdate, Pace, Timetable


def accesses(*pairs: tuple[int, float]) -> list[Access]:
    return [Access(group=group, compute_s=seconds) for group, seconds in pairs]


def test_a_fetch_is_due_when_waiting_for_the_next_access_would_make_it_late() -> None:
    # Ten seconds of compute each; with headroom a fetch lasts 4 s for group 1 and 12 s for group 2.
    table = Timetable(accesses((0, 10), (1, 10), (2, 10)), Pace(fetch_s=[2, 2, 6]))
    # Access 2 at 20 s wants its fetch by 8 s, and the one for access 1 before that, by 4 s.
    assert table.reach(-1) == 1, "at least the next one"
    assert table.reach(0) == 2
    assert table.reach(1) == 1
    assert table.reach(2) == 0


def test_fetches_queue_on_their_link() -> None:
    later = Timetable(accesses((0, 10), (1, 10), (2, 10), (3, 10)), Pace(fetch_s=[0, 4, 4, 4]))
    # By themselves those for 2 and 3 could begin at 12 and 22 s; all of them end in time.
    assert later.reach(0) == 1
    queue = Timetable(accesses((0, 10), (1, 0), (2, 0), (3, 10)), Pace(fetch_s=[0, 3, 3, 3]))
    # All of them are due at 10 s: the last may begin at 4 s, the one before it must at -2 s.
    assert queue.reach(-1) == 3
    assert queue.reach(0) == 3


def test_where_the_link_binds_everything_is_due_at_once() -> None:
    order = accesses(*((group, 1.0) for group in range(6)))
    assert Timetable(order, Pace(fetch_s=[1.0] * 6)).reach(-1) == 6
    assert Timetable(order, Pace(fetch_s=[0.1] * 6)).reach(-1) == 1
    assert Timetable(order, Pace(fetch_s=[0.1] * 6, others_s=5.5)).reach(-1) == 6


def test_unknown_compute_times_count_as_none() -> None:
    assert Timetable(accesses((0, 0), (1, 0), (0, 0)), Pace(fetch_s=[0.1, 0.1])).reach(-1) == 3


def test_transfers_that_may_stand_in_the_queue_make_it_earlier() -> None:
    order = accesses(*((group, 1.0) for group in range(6)))
    assert Timetable(order, Pace(fetch_s=[0.1] * 6, queue_s=2.5)).reach(-1) == 3


def test_the_group_in_use_needs_no_second_fetch() -> None:
    order = accesses((0, 10), (1, 10), (1, 10), (0, 10))
    table = Timetable(order, Pace(fetch_s=[4, 9]))
    # By 22 s the fetch for the last access must be under way, which nobody need know before 20 s, at the second use of 1.
    assert [table.reach(position) for position in range(-1, 4)] == [2, 1, 1, 1, 0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3)), min_size=1, max_size=12),
    st.lists(st.floats(0, 0.5), min_size=4, max_size=4),
)
def test_fetches_issued_when_they_are_due_are_never_late_on_a_link_of_their_own(
    pairs: list[tuple[int, float]], fetch_s: list[float]
) -> None:
    """Against a plain run of the clock: each one is fetched for, one after the other. The first is always waited for."""
    order = accesses(*pairs)
    table = Timetable(order, Pace(fetch_s=fetch_s))
    issued, free_at, clock = 0, 0.0, 0.0
    arrival = [0.0] * len(order)
    assume(table.reach(-1) == 1)
    for position in range(-1, len(order)):
        reach = table.reach(position)
        assert 0 <= reach <= len(order) - position - 1
        while issued < position + 1 + reach:
            again = issued and order[issued - 1].group == order[issued].group
            free_at = max(free_at, clock) + (0.0 if again else fetch_s[order[issued].group])
            arrival[issued] = free_at
            issued += 1
        if position >= 0:
            assert arrival[position] <= clock + 1e-9 or position == 0
            clock = max(clock, arrival[position]) + order[position].compute_s
    assert issued == len(order)


def test_rates_and_latencies_come_from_the_model_of_the_links() -> None:
    model = links(MIB, 2 * MIB, latency_s=0.5)
    pace = Pace.of(
        model, [3 * MIB, 0], [0, 4 * MIB], EarlyUpdate(read_bytes=MIB, written_bytes=4 * MIB, buffer_bytes=MIB)
    )
    assert pace is not None
    assert list(pace.fetch_s) == [pytest.approx(3.5), pytest.approx(2.0)]
    assert (pace.queue_s, pace.others_s) == (pytest.approx(1.0), pytest.approx(3.0))
    nothing = BandwidthModel([])
    assert Pace.of(nothing, [1], [0]) is None
    assert Pace.of(nothing, [0], [1]) is None
    assert Pace.of(nothing, [0], [0]) == Pace(fetch_s=(0.0,))
    assert {DISK, TO_DEVICE} == set(model.names)
    assert HEADROOM > 1


# -- what it gives -------------------------------------------------------------------------------------------------------


def model(compute_s: float, window: int, *, groups: int = 16, state: int = 1, micro_batches: int = 1) -> StepModel:
    """Groups of one MiB, states of ``state`` MiB updated under the backward pass."""
    order = [*range(groups), *reversed(range(groups))]
    end = len(order) * micro_batches - 1
    part = SubGroup(read_bytes=state * MIB, param_bytes=0, write_bytes=state * MIB, adam_s=0.0)
    return StepModel(
        groups=tuple(GroupModel(name=f"g{index}", window_bytes=MIB, read_bytes=MIB) for index in range(groups)),
        accesses=tuple(Access(group=group, compute_s=compute_s) for group in order) * micro_batches,
        updates=tuple(
            UpdateModel(name=f"u{index}", group=index, after=end - index, sub_groups=(part,))
            for index in reversed(range(groups))
        ),
        window_bytes=window * MIB,
        buffer_bytes=2 * state * MIB,
    )


@pytest.mark.parametrize("window", [4, 8, 12])
@pytest.mark.parametrize("compute_s", [20.0, 50.0])
def test_a_step_bound_by_compute_holds_less_ahead_and_stalls_no_more(compute_s: float, window: int) -> None:
    step = model(compute_s, window)
    ours = simulate(step, links(), steps=3)
    early = simulate(step, links(), steps=3, timetable=False)
    assert ours.step_s <= early.step_s * (1 + 1e-9)
    assert sum(ours.stalled_s.values()) <= sum(early.stalled_s.values()) + 1e-9
    assert ours.read_bytes <= early.read_bytes
    assert ours.peak_ahead_bytes < early.peak_ahead_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.05, 30.0),
    st.integers(1, 16),
    st.integers(0, 6),
    st.integers(1, 2),
    st.sampled_from([1.0, 2.0]),
)
def test_holding_fetches_back_never_makes_a_step_longer(
    compute_s: float, window: int, state: int, micro_batches: int, mix_gain: float
) -> None:
    step = model(compute_s, window, state=state, micro_batches=micro_batches)
    ours = simulate(step, links(mix_gain=mix_gain), steps=3)
    early = simulate(step, links(mix_gain=mix_gain), steps=3, timetable=False)
    assert ours.step_s <= early.step_s * 1.02


def stalls(compute: Sequence[float], window: int) -> float:
    step = replace(
        model(1.0, window, groups=len(compute)),
        accesses=tuple(
            Access(group=group, compute_s=compute[group])
            for group in [*range(len(compute)), *reversed(range(len(compute)))]
        ),
        updates=(),
    )
    done = simulate(step, links(4 * MIB, 4 * MIB), steps=3)
    return sum(done.stalled_s.values()) / done.step_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.6, 5.0), min_size=3, max_size=10), st.integers(3, 8))
def test_with_enough_compute_per_byte_nothing_is_waited_for(compute: list[float], window: int) -> None:
    assert stalls(compute, window) < 0.05

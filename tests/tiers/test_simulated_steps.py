"""Simulated steps: cases worked out by hand, what must hold for every step, and the best schedule that exists."""

import heapq
import time
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_links import MIB, links

from lamina.tiers import (
    Access,
    BandwidthModel,
    GroupModel,
    Simulation,
    StepModel,
    SubGroup,
    UpdateModel,
    Verb,
    simulate,
    simulate_ranks,
)
from lamina.tiers.links.bandwidth import DISK


def there_and_back(compute_s: float, sizes: list[int]) -> tuple[tuple[GroupModel, ...], tuple[Access, ...]]:
    groups = tuple(
        GroupModel(name=f"g{index}", window_bytes=size * MIB, read_bytes=size * MIB) for index, size in enumerate(sizes)
    )
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    return groups, tuple(Access(group=group, compute_s=compute_s) for group in order)


def passes(compute_s: float, sizes: list[int], window: int, **changes: object) -> StepModel:
    """Nothing is kept from one step to the next: an update that does not reach the copies makes them stale."""
    groups, accesses = there_and_back(compute_s, sizes)
    stale = tuple(
        UpdateModel(name=f"u{index}", sub_groups=(), group=index, renews=False) for index in range(len(sizes))
    )
    return StepModel(
        groups=groups,
        accesses=accesses,
        updates=stale,
        window_bytes=window * MIB,
        **changes,  # type: ignore[arg-type]
    )


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_a_window_for_everything_reads_everything_once() -> None:
    done = simulate(passes(10.0, [1, 1, 1], 3), links())
    assert (done.fetches, done.read_bytes) == (3, 3 * MIB)
    assert done.step_s == pytest.approx(61.0), "only the first read is waited for"
    assert done.stalled_s == {DISK: pytest.approx(1.0)}
    assert done.lower_bound_s == pytest.approx(60.0)


def test_reads_that_take_longer_than_compute_bind() -> None:
    # Forward 0 1 2, backward 2 1 0: 2 and, kept by Belady's choice, 1 are still there; 0 is read again.
    done = simulate(passes(0.1, [4, 4, 4], 2 * 4), links())
    assert done.binding == DISK
    assert done.read_bytes == 4 * 4 * MIB
    assert done.step_s == pytest.approx(16.2, abs=0.21)


def test_one_group_at_a_time_works_and_reads_every_time() -> None:
    done = simulate(passes(1.0, [1, 1], 1), links())
    # 0 | 1, 1 | 0: the group in use is never fetched again, every other use waits for its read.
    assert done.read_bytes == 3 * MIB
    assert done.step_s == pytest.approx(4 * 1.0 + 3 * 1.0)


def update(number: int, *, after: int | None, seconds: float = 1.0, adam_s: float = 1.0, **more: object) -> UpdateModel:
    part = SubGroup(read_bytes=int(seconds * MIB), write_bytes=int(seconds * MIB), adam_s=adam_s)
    return UpdateModel(name=f"u{after}", sub_groups=(part,) * number, after=after, **more)  # type: ignore[arg-type]


def at_home(compute_s: float, accesses: int, *updates: UpdateModel, **changes: object) -> StepModel:
    return StepModel(
        groups=(GroupModel(name="all"),),
        accesses=(Access(group=0, compute_s=compute_s),) * accesses,
        updates=updates,
        **changes,  # type: ignore[arg-type]
    )


def test_the_update_pipeline_overlaps_reads_adam_and_writes() -> None:
    step = at_home(0.0, 1, update(10, after=None, adam_s=1.0), buffer_count=3)
    # Half duplex: 10 s of reads and 10 s of writes in one queue; before them nothing, after the last Adam one write.
    done = simulate(step, links())
    assert done.lower_bound_s == pytest.approx(20.0)
    assert 20.0 <= done.step_s <= 23.0
    full = simulate(step, links(mix_gain=2.0))
    assert full.lower_bound_s == pytest.approx(10.0)
    assert full.step_s == pytest.approx(11.0), (
        "read, Adam and write take a second each: ten of them and one to fill; the last write goes on in the next step"
    )


def test_a_single_buffer_has_no_overlap_and_no_deadlock() -> None:
    done = simulate(at_home(0.0, 1, update(5, after=None), buffer_count=1), links())
    assert done.step_s == pytest.approx(15.0)


def test_an_update_under_the_backward_pass_hides_behind_compute_but_shares_the_cores() -> None:
    early = at_home(5.0, 4, update(2, after=1, adam_s=1.0), buffer_count=2)
    late = at_home(5.0, 4, update(2, after=None, adam_s=1.0), buffer_count=2)
    assert simulate(early, links()).step_s == pytest.approx(22.0), "20 s of compute and 2 s of Adam on the same cores"
    first, later = (simulate(late, links(), steps=steps).step_s for steps in (1, 2))
    assert first == pytest.approx(20.0 + 3.0), "read, read and Adam, write and Adam; the last write is left"
    assert later == pytest.approx(20.0 + 2.0), "both were read ahead"
    own_cores = at_home(5.0, 4, update(2, after=1, adam_s=1.0), buffer_count=2, shared_cores=False)
    assert simulate(own_cores, links()).step_s == pytest.approx(20.0)


def test_a_gradient_waits_for_room() -> None:
    updates = [update(1, after=index, seconds=3.0, adam_s=0.0, gradient_bytes=10) for index in range(3)]
    plenty = simulate(at_home(1.0, 3, *updates, buffer_count=3), links(mix_gain=2.0), steps=1)
    assert "gradient room" not in plenty.stalled_s
    one = simulate(at_home(1.0, 3, *updates, buffer_count=3, gradient_room_bytes=10), links(mix_gain=2.0), steps=1)
    # A gradient is open from the access that brings it until its Adam has run: compute and read take turns.
    assert one.stalled_s["gradient room"] == pytest.approx(6.0)
    assert one.peak_bytes["host"] == 10
    assert plenty.peak_bytes["host"] == 30


def test_a_demanded_group_overtakes_the_update_s_reads() -> None:
    groups = (GroupModel(name="home"), GroupModel(name="fetched", window_bytes=MIB, read_bytes=MIB))
    step = StepModel(
        groups=groups,
        accesses=(Access(group=0, compute_s=1.0), Access(group=1, compute_s=1.0)),
        updates=(update(3, after=0, seconds=10.0, group=1, renews=False),),
        window_bytes=MIB,
        lookahead=0,
        buffer_count=3,
    )
    assert simulate(step, links()).stalled_s[DISK] == pytest.approx(1.0)


def test_an_update_does_not_read_parameters_that_are_fetched() -> None:
    groups, accesses = there_and_back(10.0, [1, 1])
    part = SubGroup(read_bytes=6 * MIB, param_bytes=MIB, write_bytes=6 * MIB)
    updates = tuple(UpdateModel(name=f"u{group}", sub_groups=(part,), group=group) for group in (0, 1))
    narrow = StepModel(groups=groups, accesses=accesses, updates=updates, window_bytes=MIB)
    wide = StepModel(groups=groups, accesses=accesses, updates=updates, window_bytes=2 * MIB)
    assert simulate(narrow, links()).read_bytes == (2 + 5 + 6) * MIB, (
        "only group 0 is there when the backward pass ends, and is kept"
    )
    assert simulate(wide, links()).read_bytes == (5 + 5) * MIB


def test_what_goes_on_to_a_device_takes_both_ways_in_turn() -> None:
    group = GroupModel(name="far", window_bytes=4 * MIB, read_bytes=4 * MIB, up_bytes=4 * MIB)
    stale = UpdateModel(name="u", sub_groups=(), group=0, renews=False)
    step = StepModel(
        groups=(group,), accesses=(Access(group=0, compute_s=1.0),), updates=(stale,), window_bytes=4 * MIB
    )
    assert simulate(step, links()).step_s == pytest.approx(4.0 + 2.0 + 1.0)


def test_a_step_that_cannot_work_is_refused_before_it_is_simulated() -> None:
    with pytest.raises(ValueError, match=r"needs 2,097,152 bytes of a window of 1,048,576"):
        passes(1.0, [2], 1)
    with pytest.raises(ValueError, match="buffer_count"):
        at_home(1.0, 1, update(1, after=None), buffer_count=0)
    with pytest.raises(KeyError, match="no link 'nvme'"):
        simulate(passes(1.0, [1], 1), BandwidthModel([]))


# -- for every step ------------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> StepModel:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    groups, accesses = there_and_back(draw(st.floats(0.0, 3.0)), sizes)
    accesses = accesses * draw(st.integers(1, 2))
    if draw(st.booleans()):
        order = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=14))
        accesses = tuple(Access(group=group, compute_s=draw(st.floats(0, 2))) for group in order)
    updates = []
    for index in draw(st.lists(st.integers(0, len(accesses) - 1), max_size=5)):
        part = SubGroup(
            read_bytes=draw(st.integers(0, 3)) * MIB,
            param_bytes=0,
            write_bytes=draw(st.integers(0, 3)) * MIB,
            adam_s=draw(st.floats(0.0, 2.0)),
        )
        updates.append(
            UpdateModel(
                name=f"u{index}",
                sub_groups=(part,) * draw(st.integers(0, 4)),
                group=draw(st.integers(-1, len(sizes) - 1)),
                renews=draw(st.booleans()),
                after=draw(st.sampled_from([None, index])),
                streams=draw(st.booleans()) or bool(part.read_bytes or part.write_bytes),
                gradient_bytes=draw(st.integers(0, 8)),
            )
        )
    updates.sort(key=lambda item: len(accesses) if item.after is None else item.after)
    return StepModel(
        groups=groups,
        accesses=accesses,
        updates=tuple(updates),
        window_bytes=MIB * draw(st.integers(max(sizes), max(sizes) + 12)),
        lookahead=draw(st.integers(0, 20)),
        buffer_count=draw(st.integers(1, 4)),
        gradient_room_bytes=draw(st.sampled_from([None, 8, 20])),
        shared_cores=draw(st.booleans()),
    )


def check(step: StepModel, done: Simulation) -> None:
    assert len(done.uses) == len(step.accesses)
    before = 0.0
    for use, access in zip(done.uses, step.accesses, strict=True):
        assert use.group == access.group
        assert before - 1e-9 <= use.asked <= use.began <= use.ended
        if step.groups[use.group].window_bytes:
            assert use.arrived <= use.began + 1e-9, "compute began before the fetch was complete"
        assert use.ended - use.began >= access.compute_s - 1e-6
        before = use.ended
    assert done.peak_window_bytes <= step.window_bytes
    assert done.step_s >= done.lower_bound_s * (1 - 1e-6) - 1e-6
    for name, busy in done.busy_s.items():
        assert -1e-6 <= busy <= done.step_s + 1e-6
        assert done.idle_s[name] == pytest.approx(done.step_s - busy)
    held = {group: step.groups[group].window_bytes for group in done.kept}
    for action in done.actions:
        if action.verb is Verb.FETCH:
            assert action.group not in held
            held[action.group] = step.groups[action.group].window_bytes
        else:
            del held[action.group]
        assert sum(held.values()) <= step.window_bytes
    assert step.carried >= set(done.kept), "a copy that an update makes stale was used in the next step"


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from([1.0, 1.4, 2.0]), st.sampled_from([0.0, 0.01]))
def test_no_step_uses_a_group_too_early_exceeds_its_window_or_beats_its_bound(
    step: StepModel, mix_gain: float, latency_s: float
) -> None:
    model = links(2 * MIB, 3 * MIB, mix_gain=mix_gain, latency_s=latency_s)
    done = simulate(step, model, steps=3, record=True)
    check(step, done)
    assert simulate(step, model, steps=3, record=True).actions == done.actions, "deterministic"


# -- the best there is ---------------------------------------------------------------------------------------------------


State = tuple[int, frozenset[int], int, int, int]


def best_passes(sizes: list[int], order: list[int], compute: int, window: int) -> int:
    """Least time of a pass over ``order`` by trying every schedule, in whole seconds; one MiB takes one second.

    State: which access comes next, what is held, what is being fetched, seconds left of it and of the compute. At every
    moment that something ends, any set of idle groups may be evicted and any absent group fetched, or not. The shortest way
    through all states is the best schedule.
    """
    numbers = count()
    best: dict[State, int] = {}
    border: list[tuple[int, int, State]] = [(0, 0, (0, frozenset(), -1, 0, 0))]
    while True:
        now, _, state = heapq.heappop(border)
        if state[0] == len(order):
            return now
        if state in best:
            continue
        best[state] = now
        for passed, then in _moves(state, sizes, order, compute, window):
            if then not in best:
                heapq.heappush(border, (now + passed, next(numbers), then))


def _moves(state: State, sizes: list[int], order: list[int], compute: int, window: int) -> Iterator[tuple[int, State]]:
    """What can be decided now, each with the seconds until the next moment to decide."""
    at, compute_left = state[0], state[4]
    for target, kept, left in _starts(state, sizes, order, window):
        running = compute_left or (compute if order[at] in kept else 0)
        waits = [seconds for seconds in (left, running) if seconds]
        if not waits:
            continue
        until = min(waits)
        arrived = kept | {target} if target >= 0 and left == until else kept
        still = target if left > until else -1
        ends = running == until
        yield until, (at + ends, arrived, still, max(left - until, 0), 0 if ends else max(running - until, 0))


def _starts(state: State, sizes: list[int], order: list[int], window: int) -> Iterator[tuple[int, frozenset[int], int]]:
    """The fetch under way, or every one that could begin with everything that could be evicted for it."""
    at, held, fetching, fetch_left, compute_left = state
    if fetching >= 0:
        yield fetching, held, fetch_left
        return
    yield -1, held, 0
    idle = [group for group in held if not (compute_left and group == order[at])]
    for group in set(order) - held:
        for mask in range(1 << len(idle)):
            kept = held - {idle[bit] for bit in range(len(idle)) if mask >> bit & 1}
            if sum(sizes[other] for other in kept) + sizes[group] <= window:
                yield group, kept, sizes[group]


CASES = [
    ([1, 1, 1], 1, 1),
    ([1, 1, 1, 1], 1, 2),
    ([1, 1, 1, 1], 2, 2),
    ([2, 1, 2, 1], 1, 4),
    ([3, 1, 1, 2], 2, 4),
    ([2, 2, 2, 2, 2], 1, 6),
    ([2, 2, 2, 2, 2], 3, 4),
    ([1, 2, 3, 2, 1], 2, 5),
    ([1, 1, 1, 1, 1, 1], 1, 3),
    ([3, 2, 1, 1, 2, 3], 1, 6),
    ([4, 1, 1, 1], 1, 6),
    ([4, 1, 2, 1], 1, 7),
    ([4, 1, 4, 1], 1, 9),
]


@pytest.mark.parametrize(("sizes", "compute", "window"), CASES)
def test_a_pass_takes_at_most_five_percent_more_than_the_best_schedule_there_is(
    sizes: list[int], compute: int, window: int
) -> None:
    step = passes(float(compute), sizes, window)
    best = best_passes(sizes, [access.group for access in step.accesses], compute, window)
    ours = simulate(step, links(), record=True)
    assert best - 1e-6 <= ours.step_s, "the search is not exhaustive"
    assert ours.step_s <= 1.05 * best + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda size: st.lists(st.just(size), min_size=2, max_size=6)),
    st.integers(1, 4),
    st.data(),
)
def test_groups_of_one_size_are_always_within_five_percent_of_the_best(
    sizes: list[int], compute: int, data: st.DataObject
) -> None:
    window = data.draw(st.integers(sizes[0], sum(sizes)))
    step = passes(float(compute), sizes, window)
    best = best_passes(sizes, [access.group for access in step.accesses], compute, window)
    assert simulate(step, links()).step_s <= 1.05 * best + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 4), st.data())
def test_groups_of_any_sizes_are_never_further_than_fifteen_percent_from_the_best(
    sizes: list[int], compute: int, data: st.DataObject
) -> None:
    """Of 3372 random cases 14 lay above 5 percent, the worst at 10: several large groups in a window for less than two."""
    window = data.draw(st.integers(max(sizes), sum(sizes)))
    step = passes(float(compute), sizes, window)
    best = best_passes(sizes, [access.group for access in step.accesses], compute, window)
    assert simulate(step, links()).step_s <= 1.15 * best + 1e-6


# -- speed ---------------------------------------------------------------------------------------------------------------


def test_thousands_of_groups_take_seconds() -> None:
    number = 2000
    groups, accesses = there_and_back(0.001, [1] * number)
    updates = tuple(
        UpdateModel(
            name=f"u{index}",
            sub_groups=(SubGroup(read_bytes=6 * MIB, write_bytes=6 * MIB, adam_s=0.0005),),
            after=2 * number - 1 - index,
        )
        for index in reversed(range(number))
    )
    step = StepModel(groups=groups, accesses=accesses, updates=updates, window_bytes=50 * MIB, buffer_count=3)
    began = time.process_time()
    done = simulate(step, links(2 << 30, 4 << 30))
    assert time.process_time() - began < 20
    assert done.ratio < 1.1


def test_hundreds_of_ranks_cost_as_much_as_the_different_ones_among_them() -> None:
    fast, slow = passes(1.0, [1] * 50, 10), passes(1.5, [1] * 50, 10)
    began = time.process_time()
    slowest = simulate_ranks([fast] * 300 + [slow] * 212, links())
    assert time.process_time() - began < 10
    assert slowest.step_s == simulate(slow, links()).step_s

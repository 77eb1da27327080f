"""The scheduler's choices against what they must never break and against Belady's rule."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import Action, Scheduler, Verb
from lamina.tiers.schedule.scheduler import NEVER, DeviceState


@st.composite
def situations(draw: st.DrawFn) -> tuple[Scheduler, DeviceState, list[int]]:
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    capacity = draw(st.integers(max(sizes), 200))
    held: dict[int, int] = {}
    for group in draw(st.permutations(range(len(sizes)))):
        if sum(held.values()) + sizes[group] <= capacity and draw(st.booleans()):
            held[group] = sizes[group]
    busy = set(draw(st.lists(st.sampled_from(sorted(held)), unique=True))) if held else set()
    upcoming = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12))
    scheduler = Scheduler(sizes=sizes, lookahead=draw(st.integers(0, 12)))
    return scheduler, DeviceState(held=held, busy=busy, capacity_bytes=capacity), upcoming


def next_use(upcoming: list[int], group: int) -> int:
    return upcoming.index(group) if group in upcoming else NEVER


@given(situations())
def test_prefetching_never_exceeds_the_window_and_never_evicts_what_is_needed_sooner(
    situation: tuple[Scheduler, DeviceState, list[int]],
) -> None:
    scheduler, state, upcoming = situation
    held = dict(state.held)
    actions = scheduler.prefetch(state, upcoming)
    for position, action in enumerate(actions):
        if action.verb is Verb.EVICT:
            assert action.group in held
            assert action.group not in state.busy
            fetched = next(a.group for a in actions[position:] if a.verb is Verb.FETCH)
            assert next_use(upcoming, action.group) > next_use(upcoming, fetched)
            del held[action.group]
        else:
            assert action.verb is Verb.FETCH
            assert action.group not in held
            assert next_use(upcoming, action.group) < scheduler.lookahead
            held[action.group] = scheduler.sizes[action.group]
        assert sum(held.values()) <= state.capacity_bytes


def test_the_victim_is_the_one_used_furthest_in_the_future() -> None:
    scheduler = Scheduler(sizes=[10, 10, 10, 10], lookahead=8)
    state = DeviceState(held={0: 10, 1: 10, 2: 10}, busy={2}, capacity_bytes=30)
    assert scheduler.prefetch(state, [3, 1, 2, 0]) == [Action(Verb.EVICT, 0), Action(Verb.FETCH, 3)]


def test_nothing_is_fetched_at_the_price_of_what_is_used_before_it() -> None:
    scheduler = Scheduler(sizes=[10, 10, 10], lookahead=8)
    state = DeviceState(held={0: 10, 1: 10}, busy=set(), capacity_bytes=20)
    assert scheduler.prefetch(state, [0, 1, 2, 0, 1]) == []


def test_prefetch_stops_at_the_first_group_that_does_not_fit() -> None:
    """A later, smaller group must not take the room that the next one needs."""
    scheduler = Scheduler(sizes=[10, 30, 5], lookahead=8)
    state = DeviceState(held={0: 10}, busy={0}, capacity_bytes=30)
    assert scheduler.prefetch(state, [1, 2]) == []

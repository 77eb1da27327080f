"""The trace is recorded in the first step, followed afterwards, and replaced only when deviations last."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import TraceCursor
from lamina.tiers.schedule.trace import NEVER, Order, Upcoming


def run_step(cursor: TraceCursor, groups: list[int]) -> bool:
    for group in groups:
        cursor.observe(group, compute_s=0.5)
    deviant = cursor.deviant
    cursor.end_step()
    return deviant


def order(cursor: TraceCursor) -> list[int]:
    return [access.group for access in cursor.recorded]


def test_the_first_step_is_recorded_with_its_compute_times() -> None:
    cursor = TraceCursor()
    assert not cursor.known
    run_step(cursor, [0, 1, 2, 1, 0])
    assert order(cursor) == [0, 1, 2, 1, 0]
    assert [access.compute_s for access in cursor.recorded] == [0.5, 0.5, 0.5, 0.5, 0.0]


def test_what_is_to_come_ends_with_the_step_and_begins_anew_after_it() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 2])
    assert list(cursor.ahead) == [0, 1, 2]
    for group in (0, 1):
        cursor.observe(group)
    assert list(cursor.ahead) == [2]
    cursor.observe(2)
    assert list(cursor.ahead) == []
    cursor.end_step()
    assert list(cursor.ahead) == [0, 1, 2]


def test_a_step_that_is_repeated_without_its_end_starts_at_the_front() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 0])
    for group in (0, 1, 0, 0, 1):
        cursor.observe(group)
    assert not cursor.deviant
    assert list(cursor.ahead) == [0]
    cursor.observe(0)
    cursor.end_step()
    assert order(cursor) == [0, 1, 0]


def test_a_skipped_group_is_a_deviation_and_the_cursor_finds_its_way_back() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 2, 3])
    cursor.observe(0)
    cursor.observe(2)
    assert cursor.deviant
    assert list(cursor.ahead) == [3]


def test_one_odd_step_keeps_the_trace_two_replace_it() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 2])
    assert run_step(cursor, [0, 2])
    assert order(cursor) == [0, 1, 2]
    assert run_step(cursor, [0, 2])
    assert order(cursor) == [0, 2]
    assert not run_step(cursor, [0, 2])


def test_a_step_that_ends_early_counts_as_odd() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 2])
    run_step(cursor, [0, 1])
    run_step(cursor, [0, 1, 2])
    run_step(cursor, [0, 1])
    assert order(cursor) == [0, 1, 2], "odd steps that do not follow each other leave the trace alone"
    run_step(cursor, [0, 1])
    assert order(cursor) == [0, 1]


def test_a_step_without_accesses_changes_nothing() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1])
    run_step(cursor, [])
    run_step(cursor, [])
    assert order(cursor) == [0, 1]


def test_the_way_ahead_tells_the_distance_of_every_group() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 2, 1, 0])
    for group in (0, 1):
        cursor.observe(group)
    assert list(cursor.ahead) == [2, 1, 0]
    assert [cursor.ahead.next_use(group) for group in (2, 1, 0, 7)] == [0, 1, 2, NEVER]
    cursor.end_step()
    run_step(cursor, [0, 2])
    run_step(cursor, [0, 2])
    assert list(cursor.ahead) == [0, 2], "a new trace has a new index"


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(0, 22),
    st.integers(0, 6),
    st.slices(22),
)
def test_a_group_s_next_use_is_where_a_plain_search_finds_it(
    groups: list[int], at: int, wanted: int, part: slice
) -> None:
    ahead, listed = Upcoming(Order(groups), at), groups[at:]
    assert list(ahead) == listed
    assert [ahead[i] for i in range(-len(ahead), len(ahead))] == listed + listed
    assert list(ahead[part]) == listed[part]
    assert ahead.next_use(wanted) == (listed.index(wanted) if wanted in listed else NEVER)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(0, 20),
    st.sets(st.integers(0, 6)),
    st.integers(0, 6),
)
def test_uses_in_the_next_step_count_for_copies_that_outlive_this_one(
    groups: list[int], at: int, carried: set[int], wanted: int
) -> None:
    at = min(at, len(groups))
    rest, both = groups[at:], groups[at:] + groups
    seen = both if wanted in carried else rest
    assert Upcoming(Order(groups, carried), at).next_use(wanted) == (seen.index(wanted) if wanted in seen else NEVER)


def test_what_is_carried_can_change_with_the_homes() -> None:
    cursor = TraceCursor()
    run_step(cursor, [0, 1, 0])
    for group in (0, 1, 0):
        cursor.observe(group)
    assert cursor.ahead.next_use(1) == NEVER
    cursor.carry([1])
    assert cursor.ahead.next_use(1) == 1


def test_the_last_access_has_the_time_that_the_step_s_end_tells() -> None:
    cursor = TraceCursor()
    cursor.observe(0)
    cursor.observe(1, 0.25)
    cursor.end_step(0.5)
    assert [access.compute_s for access in cursor.recorded] == [0.25, 0.5]

"""How the time of a run is divided and handed out."""

import pytest

from lamina.bench.nvme.args import EXTRAS
from lamina.bench.nvme.budget import Allowance, OutOfTime, Part, divide

GIB = 1 << 30


def seconds_of(parts: list[Part], name: str) -> float:
    return sum(part.seconds for part in parts if part.name == name)


@pytest.mark.parametrize("seconds", [30.0, 60.0, 600.0])
@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("fio", [False, True])
def test_the_parts_add_up_to_the_time(seconds: float, paths: int, fio: bool) -> None:
    parts = divide(seconds, paths=paths, size_bytes=2 * GIB, processes=2, fio=fio, extras=EXTRAS)
    assert sum(part.seconds for part in parts) == pytest.approx(seconds)
    assert seconds_of(parts, "search") + seconds_of(parts, "fio") >= 0.26 * seconds
    assert (seconds_of(parts, "fio") > 0) is fio
    assert (seconds_of(parts, "together") > 0) is (paths > 1)


def test_the_default_run_spends_most_on_the_search() -> None:
    parts = divide(60.0, paths=1, size_bytes=2 * GIB, processes=1, fio=False, extras=EXTRAS)
    assert seconds_of(parts, "search") > 30.0
    assert [part.name for part in parts] == ["setup", "search", "pages", "region", "memory", "device", "gather"]


def test_short_runs_go_without_the_all_gather_unless_it_is_named() -> None:
    few = divide(10.0, paths=1, size_bytes=GIB, processes=1, fio=False, extras=EXTRAS)
    assert seconds_of(few, "gather") == 0.0
    named = divide(10.0, paths=1, size_bytes=GIB, processes=1, fio=False, extras=EXTRAS, insist_on_gather=True)
    assert seconds_of(named, "gather") > 0.0
    assert seconds_of(divide(60.0, paths=1, size_bytes=GIB, processes=1, fio=False, extras=()), "gather") == 0.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


PLAN = [Part(name="setup", seconds=2.0), Part(name="search", seconds=6.0), Part(name="pages", seconds=2.0)]


def test_a_run_on_time_gets_what_was_planned() -> None:
    clock = Clock()
    time = Allowance(PLAN, 10.0, clock)
    for part in PLAN:
        assert time.take(part.name) == pytest.approx(part.seconds)
        clock.now += part.seconds
    assert (time.spent, time.share) == (10.0, 1.0)


def test_lateness_is_shared_by_what_is_left() -> None:
    clock = Clock()
    time = Allowance(PLAN, 10.0, clock)
    time.take("setup")
    clock.now += 6.0
    assert time.take("search") == pytest.approx(3.0)
    clock.now += 5.0
    assert time.take("pages") == 0.0
    assert time.take("pages") == 0.0


def test_parts_that_are_left_out_give_their_time_away() -> None:
    clock = Clock()
    time = Allowance(PLAN, 10.0, clock)
    assert time.take("pages") == pytest.approx(10.0)
    assert time.take("search") == 0.0


def test_a_part_with_a_fixed_length_keeps_it() -> None:
    clock = Clock()
    plan = [Part(name="search", seconds=6.0), Part(name="gather", seconds=4.0)]
    time = Allowance(plan, 10.0, clock)
    clock.now += 4.0
    assert time.take("search") == pytest.approx(2.0)
    clock.now += 20.0
    assert time.take("gather") == 4.0


def test_after_the_deadline_parts_are_told_to_end() -> None:
    clock = Clock()
    time = Allowance(PLAN, 10.0, clock, deadline_s=12.0)
    clock.now += 11.9
    time.check()
    assert time.left == pytest.approx(0.1)
    clock.now += 0.2
    with pytest.raises(OutOfTime):
        time.check()
    assert time.left == 0.0


def test_without_a_deadline_there_is_always_time() -> None:
    clock = Clock()
    time = Allowance(PLAN, 10.0, clock)
    clock.now += 1e6
    time.check()
    assert time.left == float("inf")

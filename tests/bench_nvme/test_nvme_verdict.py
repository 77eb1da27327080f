"""Medians, intervals, the choice of points and the doubts, from made-up measurements."""

import random
import statistics

import pytest
from nvme_toys import measured, point

from lamina.bench.nvme.points import Workload
from lamina.bench.nvme.verdict import Doubt, best, coverage, doubts, drift, recommend, summarise


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (5, 0), (9, 1), (11, 2), (20, 5)])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int, cut: int) -> None:
    source = random.Random(count)
    rounds = 4000
    inside = 0
    for _ in range(rounds):
        ordered = sorted(source.gauss(0.0, 1.0) for _ in range(count))
        inside += ordered[cut] <= 0.0 <= ordered[count - 1 - cut]
    assert inside / rounds == pytest.approx(coverage(count, cut), abs=0.025)


def test_the_interval_is_the_narrowest_that_is_sure_enough() -> None:
    for count in range(1, 40):
        found = summarise(float(value) for value in range(count))
        cut = int(found.low)
        assert found.high == count - 1 - cut
        assert found.median == statistics.median(range(count))
        if found.sure < 0.95:
            assert cut == 0
        elif 2 * (cut + 1) < count:
            assert coverage(count, cut + 1) < 0.95
    with pytest.raises(ValueError, match="no measurement"):
        summarise([])


def test_a_lucky_single_measurement_does_not_win() -> None:
    slow, lucky = point(depth=4), point(depth=8)
    results = [measured(2.0e9, at=slow) for _ in range(5)] + [measured(9.0e9, at=lucky)]
    found = best(results, Workload.READ)
    assert found is not None
    assert found.point == slow
    assert found.rivals == (lucky,)
    assert best(results, Workload.WRITE) is None


def test_points_are_rivals_when_their_intervals_overlap() -> None:
    one, close, far = point(depth=1), point(depth=2), point(depth=4)
    results = [measured(rate, at=one) for rate in (2.0e9, 2.1e9, 2.2e9)]
    results += [measured(rate, at=close) for rate in (1.8e9, 1.9e9, 2.05e9)]
    results += [measured(rate, at=far) for rate in (1.0e9, 1.1e9, 1.2e9)]
    found = best(results, Workload.READ)
    assert found is not None
    assert (found.point, found.rivals) == (one, (close,))
    assert found.certainty == "2.00 to 2.20, 75% sure (n=3)"


def test_the_recommendation_is_the_best_worst_share_and_small_among_equals() -> None:
    rates = {
        (1 << 20, 4): (2.0e9, 4.00e9),
        (1 << 20, 32): (2.0e9, 4.05e9),
        (8 << 20, 32): (2.7e9, 2.0e9),
    }
    results = []
    for (block, depth), (read, write) in rates.items():
        at = point(block=block, depth=depth)
        results += [measured(read, at=at), measured(write, at=at, workload=Workload.WRITE)]
    workloads = [Workload.READ, Workload.WRITE]
    assert recommend(results, workloads) == point(block=1 << 20, depth=4)
    assert recommend(results, [Workload.READ]) == point(block=8 << 20, depth=32)
    assert recommend(results, [Workload.READ, Workload.MIX]) is None


def test_uring_is_recommended_among_equals() -> None:
    results = [measured(2.0e9, at=point("threads")), measured(1.99e9, at=point("uring"))]
    assert recommend(results, [Workload.READ]) == point("uring")
    results = [measured(2.0e9, at=point("threads")), measured(1.5e9, at=point("uring"))]
    assert recommend(results, [Workload.READ]) == point("threads")


def kinds(rates: list[float], **facts: object) -> list[Doubt]:
    results = [measured(rate) for rate in rates]
    found = best(results, Workload.READ)
    assert found is not None
    settings: dict[str, object] = {"path": "/d", "direct": True} | facts
    return [warned.doubt for warned in doubts({Workload.READ: found}, results, **settings)]  # type: ignore[arg-type]


STEADY = [2.00e9, 2.01e9, 1.99e9, 2.02e9, 2.00e9, 1.98e9, 2.00e9, 2.01e9, 2.00e9]


def test_steady_direct_figures_raise_no_doubt() -> None:
    assert kinds(STEADY, copy_rate=4e10, small_region_gain=1.05) == []


def test_figures_of_the_page_cache_and_of_caches_below_are_said_so() -> None:
    assert kinds(STEADY, direct=False) == [Doubt.CACHED]
    assert kinds(STEADY, copy_rate=1.9e9) == [Doubt.CACHED]
    assert kinds(STEADY, small_region_gain=1.5) == [Doubt.CACHED]


def test_a_falling_rate_is_throttled_and_a_scattered_one_noisy() -> None:
    falling = [4.0e9, 3.9e9, 4.1e9, 3.0e9, 2.5e9, 2.4e9, 2.0e9, 2.1e9, 2.0e9]
    assert Doubt.THROTTLED in kinds(falling)
    assert kinds([2.0e9, 2.5e9, 1.5e9, 2.2e9, 1.6e9, 2.4e9, 1.9e9]) == [Doubt.NOISY]


def test_drift_needs_six_values_and_ignores_rises() -> None:
    assert drift([5.0, 1.0, 1.0]) == 0.0
    assert drift([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]) == 0.0
    assert drift([4.0, 4.0, 3.0, 3.0, 2.0, 2.0]) == pytest.approx(0.5)

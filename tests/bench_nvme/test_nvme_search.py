"""The search as a pure function: on made-up disks it finds the best point within the time, and stops."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_toys import measured, point

from lamina.bench.nvme.points import Measured, Phase, Point, Space, Trial, Workload, coarse_axis, spread_order
from lamina.bench.nvme.search import Schedule, all_points, next_trial
from lamina.bench.nvme.verdict import best, by_point, recommend

K, M = 1 << 10, 1 << 20
SPACE = Space(
    backends=("uring", "threads"),
    blocks=(64 * K, 256 * K, M, 2 * M, 4 * M, 8 * M),
    depths=(1, 2, 4, 8, 16, 32, 64),
    files=(1, 2, 4),
    max_inflight_bytes=128 * M,
)
Disk = Callable[[Workload, Point], float]


def disk_with_peak(peak: Point) -> Disk:
    """A rate that falls with the distance from the peak on every axis."""

    def rate(workload: Workload, at: Point) -> float:
        steps = abs(math.log2(at.block_bytes / peak.block_bytes)) + abs(math.log2(at.queue_depth / peak.queue_depth))
        steps += abs(math.log2(at.files / peak.files)) + (at.backend != peak.backend)
        return 4e9 * 0.85**steps

    return rate


def run(space: Space, disk: Disk, schedule: Schedule, *, noise: float = 0.0, overhead: float = 0.03) -> list[Measured]:
    """Carry a search out on a made-up disk."""
    source = random.Random(1)
    results: list[Measured] = []
    while (trial := next_trial(space, results, schedule)) is not None:
        rate = disk(trial.workload, trial.point) * (1 + noise * source.uniform(-1, 1))
        results.append(
            measured(
                rate,
                at=trial.point,
                workload=trial.workload,
                cost_s=trial.seconds + overhead,
                seconds=trial.seconds,
                phase=trial.phase,
            )
        )
        assert len(results) < 10_000
    return results


def spent(results: Sequence[Measured]) -> float:
    return sum(result.cost_s for result in results)


@pytest.mark.parametrize(
    "peak",
    [
        point("uring", M, 16),
        point("threads", 8 * M, 8),
        point("uring", 256 * K, 64, files=2),
        point("threads", 64 * K, 1),
        point("uring", 2 * M, 32, files=4),
    ],
)
def test_the_peak_is_found_and_repeated(peak: Point) -> None:
    results = run(SPACE, disk_with_peak(peak), Schedule(seconds=38.0))
    for workload in Workload:
        found = best(results, workload)
        assert found is not None
        assert found.point == peak
        assert found.rate.samples >= 5


def test_noise_of_five_percent_costs_little() -> None:
    disk = disk_with_peak(point("threads", 4 * M, 8))
    results = run(SPACE, disk, Schedule(seconds=38.0), noise=0.05)
    for workload in Workload:
        found = best(results, workload)
        assert found is not None
        assert disk(workload, found.point) >= 0.84 * 4e9


def test_each_workload_has_its_own_peak_and_one_point_serves_all() -> None:
    peaks = {
        Workload.READ: point("uring", M, 16),
        Workload.WRITE: point("uring", M, 4),
        Workload.MIX: point("uring", M, 8),
    }

    def disk(workload: Workload, at: Point) -> float:
        return disk_with_peak(peaks[workload])(workload, at)

    results = run(SPACE, disk, Schedule(seconds=60.0))
    assert {workload: found.point for workload in Workload if (found := best(results, workload))} == peaks
    chosen = recommend(results, SPACE.workloads)
    assert chosen is not None
    assert min(disk(workload, chosen) / 4e9 for workload in Workload) >= 0.84**2
    for workload in Workload:
        assert len(by_point(results, workload)[chosen]) >= 5


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0, 38.0])
def test_the_time_is_kept(seconds: float) -> None:
    schedule = Schedule(seconds=seconds)
    results = run(SPACE, disk_with_peak(point()), schedule)
    longest = max(result.cost_s for result in results)
    assert spent(results) <= seconds + longest
    assert {result.trial.workload for result in results} == set(Workload)


def test_trials_that_take_longer_than_planned_are_taken_into_account() -> None:
    results = run(SPACE, disk_with_peak(point()), Schedule(seconds=20.0), overhead=0.4)
    assert spent(results) <= 20.0 + 1.5


def test_without_time_every_workload_is_still_measured_once() -> None:
    results = run(SPACE, disk_with_peak(point()), Schedule(seconds=0.001), overhead=5.0)
    assert [result.trial.workload for result in results] == list(Workload)


def test_with_plenty_of_time_it_ends_when_the_figures_are_settled() -> None:
    schedule = Schedule(seconds=10_000.0)
    results = run(SPACE, disk_with_peak(point()), schedule)
    assert spent(results) < 1000
    for workload in Workload:
        groups = by_point(results, workload)
        assert max(map(len, groups.values())) == schedule.max_repeats


def test_the_clock_of_the_caller_counts() -> None:
    results = [measured(1e9, workload=workload) for workload in Workload]
    assert next_trial(SPACE, results, Schedule(seconds=10.0), spent_s=9.99) is None
    assert next_trial(SPACE, results, Schedule(seconds=10.0), spent_s=1.0) is not None


def test_phases_come_in_order_and_coarse_covers_the_grid() -> None:
    results = run(SPACE, disk_with_peak(point("uring", M, 16)), Schedule(seconds=60.0))
    phases = [result.trial.phase for result in results]
    first = {phase: phases.index(phase) for phase in Phase}
    assert first[Phase.COARSE] < first[Phase.REFINE] < first[Phase.REPEAT]
    grid = {(at, workload) for at in SPACE.coarse() for workload in Workload}
    assert grid <= {(result.trial.point, result.trial.workload) for result in results}


@settings(max_examples=40, deadline=None)
@given(
    backends=st.lists(st.sampled_from(["uring", "threads"]), min_size=1, max_size=2, unique=True),
    blocks=st.lists(st.sampled_from([64 * K, 256 * K, M, 4 * M]), min_size=1, unique=True).map(sorted),
    depths=st.lists(st.sampled_from([1, 3, 8, 32]), min_size=1, unique=True).map(sorted),
    files=st.lists(st.sampled_from([1, 2, 3]), min_size=1, unique=True).map(sorted),
    workloads=st.lists(st.sampled_from(list(Workload)), min_size=1, unique=True),
    seconds=st.floats(0.01, 30.0),
    seed=st.integers(0, 99),
)
def test_any_space_is_searched_inside_and_in_time(
    backends: list[str],
    blocks: list[int],
    depths: list[int],
    files: list[int],
    workloads: list[Workload],
    seconds: float,
    seed: int,
) -> None:
    space = Space(
        backends=backends, blocks=blocks, depths=depths, files=files, workloads=workloads, max_inflight_bytes=1 << 30
    )
    source = random.Random(seed)
    rates = {at: source.uniform(1e8, 5e9) for at in all_points(space)}
    results = run(space, lambda workload, at: rates[at], Schedule(seconds=seconds))
    assert {result.trial.point for result in results} <= set(rates)
    assert {result.trial.workload for result in results} == set(workloads)
    assert spent(results) <= max(seconds, 0.2 * len(workloads)) + 1.1
    small = len(rates) * len(workloads) < 20
    if small and seconds > 20:
        for workload in workloads:
            found = best(results, workload)
            assert found is not None
            neighbours = list(space.neighbours(found.point))
            assert all(rates[other] <= rates[found.point] for other in neighbours)


def test_points_that_need_too_much_memory_are_left_out() -> None:
    assert all(at.inflight_bytes <= 128 * M for at in all_points(SPACE))
    assert all(other.inflight_bytes <= 128 * M for at in all_points(SPACE) for other in SPACE.neighbours(at))
    with pytest.raises(ValueError, match="every point needs more than 4096 bytes of buffers"):
        Space(backends=("uring",), blocks=(64 * K,), depths=(1,), max_inflight_bytes=4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": ()}, "blocks: nothing to try"),
        ({"depths": (4, 1)}, "the smallest first"),
        ({"files": (0, 1)}, "positive"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(changes: dict[str, tuple[int, ...]], message: str) -> None:
    values: dict[str, tuple[int, ...]] = {"blocks": (64 * K,), "depths": (1,), "files": (1,)}
    with pytest.raises(ValueError, match=message):
        Space(backends=("uring",), **(values | changes))


def test_neighbours_differ_in_one_thing() -> None:
    middle = point("uring", M, 8, files=2)
    found = list(SPACE.neighbours(middle))
    assert len(found) == len(set(found)) == 7
    for other in found:
        names = ("backend", "block_bytes", "queue_depth", "files")
        assert sum(getattr(other, name) != getattr(middle, name) for name in names) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_the_order_of_the_grid_is_a_permutation_that_spreads(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    if count >= 8:
        quarter = sorted(order[: count // 4])
        assert quarter[0] < count / 3
        assert quarter[-1] > 2 * count / 3


def test_coarse_axes_keep_both_ends() -> None:
    assert coarse_axis([1, 2, 3]) == [1, 2, 3]
    assert coarse_axis([1, 2, 4, 8]) == [1, 4, 8]
    assert coarse_axis([1, 2, 4, 8, 16, 32, 64]) == [1, 4, 16, 64]


def test_a_trial_says_what_it_measures() -> None:
    trial = next_trial(SPACE, [], Schedule(seconds=10.0))
    assert isinstance(trial, Trial)
    assert trial.phase is Phase.COARSE
    assert str(point("uring", 64 * K, 8, files=2)) == "uring 64K x 8 in 2 files"

"""Which point to measure next: a pure function of what was measured and the time that is left.

Three phases for each workload: the coarse grid, then climbing to better neighbours of the best, then repeating the best
few until there are enough repeats to be sure. The caller measures; nothing here looks at a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .points import Measured, Phase, Point, Space, Trial, Workload
from .verdict import by_point, recommend, score

COARSE_SHARE = 0.5
"""Of the time for the search."""
REFINE_SHARE = 0.2
LONGEST_S = 1.0
CLIMBS = 3
FINALISTS = 3


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Time for one search, in seconds, and how finely it is cut."""

    seconds: float
    """For all trials together."""
    shortest_s: float = 0.08
    overhead_s: float = 0.04
    """Wall time of a trial beyond its seconds, until the trials themselves have told."""
    min_repeats: int = 5
    max_repeats: int = 11


def next_trial(
    space: Space, results: Sequence[Measured], schedule: Schedule, spent_s: float | None = None
) -> Trial | None:
    """The next trial, or None when time is up or every figure is settled.

    spent_s: time used so far, when the caller knows better than the sum of the trials. The first trial of each workload
    is made however short the time: a result late is better than none.
    """
    spent = sum(result.cost_s for result in results) if spent_s is None else spent_s
    overhead = _overhead(results, schedule)
    left = schedule.seconds - spent
    unseen = [workload for workload in space.workloads if not by_point(results, workload)]
    if left < schedule.shortest_s + overhead:
        if not unseen:
            return None
        return Trial(workload=unseen[0], point=space.coarse()[0], seconds=schedule.shortest_s)
    for plan in (_coarse, _refine, _repeat):
        trial = plan(space, results, schedule, left, overhead)
        if trial is not None:
            return trial
    return None


def _overhead(results: Sequence[Measured], schedule: Schedule) -> float:
    """Mean wall time of a trial beyond its seconds."""
    extra = [result.cost_s - result.trial.seconds for result in results]
    return max(0.0, sum(extra) / len(extra)) if extra else schedule.overhead_s


def _length(available_s: float, trials: int, schedule: Schedule, overhead: float) -> float:
    """Seconds for each of `trials` so that all fit, within the bounds."""
    return min(LONGEST_S, max(schedule.shortest_s, available_s / max(1, trials) - overhead))


def _coarse(
    space: Space, results: Sequence[Measured], schedule: Schedule, left: float, overhead: float
) -> Trial | None:
    """The grid, all workloads of a point one after the other, as far as its share of the time goes."""
    grid = [(point, workload) for point in space.coarse() for workload in space.workloads]
    done = {(result.trial.point, result.trial.workload) for result in results}
    todo = [pair for pair in grid if pair not in done]
    available = left - (1 - COARSE_SHARE) * schedule.seconds
    if not todo or available <= 0:
        return None
    point, workload = todo[0]
    seconds = _length(available, len(todo), schedule, overhead)
    return Trial(workload=workload, point=point, seconds=seconds, phase=Phase.COARSE)


def _refine(
    space: Space, results: Sequence[Measured], schedule: Schedule, left: float, overhead: float
) -> Trial | None:
    """A neighbour of the best point that was not tried, for the workload that has had the fewest of these."""
    available = left - (1 - COARSE_SHARE - REFINE_SHARE) * schedule.seconds
    if available <= 0:
        return None
    used = dict.fromkeys(space.workloads, 0)
    for result in results:
        if result.trial.phase is Phase.REFINE:
            used[result.trial.workload] += 1
    for workload in sorted(space.workloads, key=lambda name: used[name]):
        groups = by_point(results, workload)
        if not groups:
            continue
        top = max(groups, key=lambda point: score(groups[point]))
        fresh = [point for point in space.neighbours(top) if point not in groups]
        if fresh:
            # Climbing takes several rounds of neighbours; how many is not known beforehand.
            trials = CLIMBS * sum(1 for _ in space.neighbours(top)) * len(space.workloads)
            seconds = _length(available, trials, schedule, overhead)
            return Trial(workload=workload, point=fresh[0], seconds=seconds, phase=Phase.REFINE)
    return None


def _repeat(
    space: Space, results: Sequence[Measured], schedule: Schedule, left: float, overhead: float
) -> Trial | None:
    """The finalist with the fewest measurements; workloads in turn, so that a disturbance meets all alike."""
    wanted: list[tuple[int, int, int, Workload, Point]] = []
    missing = 0
    for_all = recommend(results, space.workloads)
    for turn, workload in enumerate(space.workloads):
        groups = by_point(results, workload)
        # The point for all workloads goes into the profile: it wants repeats although it may win none of them.
        last = finalists(groups)
        points = last if for_all is None or for_all in last else [*last, for_all]
        for rank, point in enumerate(points):
            count = len(groups[point])
            missing += max(0, schedule.min_repeats - count)
            if count < schedule.max_repeats:
                wanted.append((count, rank, turn, workload, point))
    if not wanted:
        return None
    _, _, _, workload, point = min(wanted)
    seconds = _length(left, max(missing, len(wanted)), schedule, overhead)
    return Trial(workload=workload, point=point, seconds=seconds, phase=Phase.REPEAT)


def finalists(groups: dict[Point, list[Measured]]) -> list[Point]:
    """The best few points of one workload, the best first."""
    return sorted(groups, key=lambda point: (-score(groups[point]), point))[:FINALISTS]


def all_points(space: Space) -> list[Point]:
    """Every point that the search may reach."""
    return [
        Point(backend=backend, block_bytes=block, queue_depth=depth, files=files)
        for backend in space.backends
        for block in space.blocks
        for depth in space.depths
        for files in space.files
        if space.allows(Point(backend=backend, block_bytes=block, queue_depth=depth, files=files))
    ]

"""The least time of a step: never more than the step took, whoever waited for whom."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.engine.metrics import StepCosts
from lamina.tiers import DiskSpeed

COSTS = StepCosts(compute_s=6.0, adam_s=2.0, forward_backward_io_s=1.0, update_io_s=4.0, cores_s=5.0)


@pytest.mark.parametrize(
    ("changes", "barrier", "shared_cores", "least"),
    [
        ({}, True, True, 6 + 4),
        ({"forward_backward_io_s": 9.0}, True, True, 9 + 4),
        ({"adam_s": 5.0}, True, True, 6 + 5),
        ({}, False, True, 5),  # processor time: the passes' 6 seconds hold up to 2 in which Adam had the cores
        ({"cores_s": 3.0}, False, True, 6 - 2 + 1),  # the disk: 1 + 4
        ({"cores_s": 3.0, "update_io_s": 1.0}, False, True, 6 - 2),
        ({"adam_s": 8.0}, False, True, 8),
        ({"cores_s": 20.0}, False, True, 6 + 2),  # threads that wait awake compute nothing
        ({}, False, False, 6),  # the passes ran on a device of their own
        ({"update_io_s": 7.0}, False, False, 1 + 7),
        ({"update_io_s": 7.0, "busy_io_s": 7.5}, False, False, 7.5),  # the disk was faster than it was taken for
        ({"update_io_s": 9.0, "busy_io_s": 5.0}, True, False, 6 + 9 / 10 * 5),
    ],
)
def test_the_slowest_channel_tells(changes: dict[str, float], barrier: bool, shared_cores: bool, least: float) -> None:
    costs = replace(COSTS, **changes, barrier=barrier, shared_cores=shared_cores)
    assert costs.lower_bound_s == least


def test_the_same_work_on_another_disk() -> None:
    slower = replace(COSTS, ahead_io_s=0.5, late_io_s=1.5).with_io_s(10.0)
    assert (slower.forward_backward_io_s, slower.update_io_s, slower.io_s) == (2.0, 8.0, 10.0)
    assert (slower.ahead_io_s, slower.late_io_s) == (1.0, 3.0)
    assert (slower.compute_s, slower.adam_s, slower.cores_s) == (6.0, 2.0, 5.0)
    nothing = replace(COSTS, forward_backward_io_s=0.0, update_io_s=0.0)
    assert nothing.with_io_s(3.0) == nothing


@pytest.mark.parametrize(("clipping", "rate"), [(0, 1.0), (0, 1e15), (1.0, 1e15)])
def test_no_step_is_shorter_than_its_bound(clipping: float, rate: float, tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path), gradient_clipping=clipping)
    with initialize(build(), config=config)[0] as engine:
        engine._meter._disks = ((DiskSpeed(read=rate, write=rate, direct=True), 1.0),)  # the disk as it was taken for
        for index in range(4):
            engine.backward(engine(*batch(index)))
            engine.step()
            metrics = engine.metrics()
            assert metrics.costs is not None
            assert 0 < metrics.lower_bound_s <= metrics.step_s
            assert 0 < metrics.costs.busy_io_s <= metrics.step_s
            assert (metrics.costs.io_s > metrics.step_s) == (rate == 1.0)


class Preempted:
    """Stands for the module ``time`` in a process that has all cores, and longer each time until it gets an answer to how much
    it computed."""

    now, delay = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        self.delay *= 2
        self.now += self.delay
        return self.now * len(os.sched_getaffinity(0))


def test_no_step_is_shorter_than_its_processor_time_wherever_the_clock_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Preempted()
    for module in ("training", "meter"):
        monkeypatch.setattr(f"lamina.engine.{module}.time", clock)
    with initialize(build(), config=settings())[0] as engine:
        for index in range(3):
            engine.backward(engine(*batch(index)))
            engine.step()
            assert 0 < engine.metrics().lower_bound_s <= engine.metrics().step_s

"""The least time of a step: never more than the step took, whoever waited for whom."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.engine.metrics import StepCosts, lower_bound

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
        ({}, False, False, 6),  # the passes ran on a device of their own
        ({"update_io_s": 7.0}, False, False, 1 + 7),
    ],
)
def test_the_slowest_channel_tells(changes: dict[str, float], barrier: bool, shared_cores: bool, least: float) -> None:
    assert lower_bound(replace(COSTS, **changes), barrier=barrier, shared_cores=shared_cores) == least


@pytest.mark.parametrize("clipping", [0, 1.0])
def test_no_step_is_shorter_than_its_bound_for_computing(clipping: float, tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path), gradient_clipping=clipping)
    with initialize(build(), config=config)[0] as engine:
        engine._meter._disks = ()  # the disk's rates are measured beforehand, and may be better during a step
        for index in range(4):
            engine.backward(engine(*batch(index)))
            engine.step()
            assert 0 < engine.metrics().lower_bound_s <= engine.metrics().step_s


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

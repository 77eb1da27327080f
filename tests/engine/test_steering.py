"""The engine moves state while it trains, where what was measured says that it pays: same bits, told in engine.plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from residual_model import batch, residual_model

from lamina.aio_native import DeviceStats, DirectionStats, IOStats
from lamina.engine import TrainingEngine, initialize
from lamina.engine.steering import Steering, StepWork, disk_work
from lamina.tiers import BandwidthModel, Choice, ComputeTimes, Curve, Link, PlacementQuestion
from lamina.tiers.links.bandwidth import DISK

WIDTH = 128
KIB = 1 << 10


def start(path: Path) -> TrainingEngine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tiers": {"nvme": [str(path)], "device_bytes": 130 * KIB, "host_bytes": 1500 * KIB},
    }
    return initialize(residual_model(WIDTH), config=config)[0]


def train(engine: TrainingEngine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(batch(step, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def at_rest(_: Steering, __: Choice) -> None:
    """Nothing new is known of the times of computing."""


def test_much_compute_moves_memory_from_parameters_to_optimizer_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute that hides all fetches of parameters, and an update that the disk binds. What the disk was measured to do plays no
    part: the first homes are those that budgets suggest, and the rates are given."""

    def given(question: PlacementQuestion) -> Choice:
        disk = Link(name=DISK, read=Curve.flat(2e9), write=Curve.flat(2e9))
        return Choice.given(replace(question, links=BandwidthModel([disk])), question.place())

    monkeypatch.setattr("lamina.zero.homes.choosing.choose", given)
    monkeypatch.setattr(Steering, "_new_times", at_rest)
    with start(tmp_path / "stays") as engine:
        losses = train(engine, 8)
        assert engine.plan.changes == []

    def passes_that_hide_fetches(steering: Steering, choice: Choice) -> ComputeTimes | None:
        if steering._steps != 3:
            return None
        link, question = choice.question.links.link(DISK), choice.question
        passes_s = 2 * sum(link.read_s(s.full_bytes) for s in question.segments)
        return ComputeTimes.proportional(
            question.segments, forward_s=passes_s, backward_s=passes_s, adam_elements_per_s=1e12
        )

    monkeypatch.setattr(Steering, "_new_times", passes_that_hide_fetches)
    with start(tmp_path / "moves") as engine:
        before = engine.plan.placement
        found = train(engine, 8)
        after = engine.plan.placement
        assert found == losses
        assert engine.runtime.decision.choice is not None
        assert engine.runtime.decision.choice.placement is engine.runtime.placement
        told = " ".join(engine.plan.changes)
        assert "another placement would take" in told, told

    def states_in_memory(plan: dict[str, Any]) -> int:
        return sum(home["state"] != "nvme" for home in plan["homes"].values())

    assert states_in_memory(after) > states_in_memory(before)
    assert after["tiers"]["host"]["bytes"] <= 1500 * KIB


def test_each_pass_has_its_own_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the backward pass waits, the forward pass has computed all the time."""
    work: list[StepWork] = []
    monkeypatch.setattr(Steering, "after_step", lambda _, step_work: work.append(step_work))
    with start(tmp_path) as engine:
        for step in range(2):
            loss = engine(batch(step, WIDTH))
            engine.runtime.updater.counters.room_stall_s += 1000.0
            engine.backward(loss)
            engine.step()
            metrics = engine.metrics()
            waited = metrics.stalled_s["nvme->host"]
            assert metrics.forward_s - waited <= work[-1].forward_s <= metrics.forward_s
            assert work[-1].backward_s == 0.0
            assert metrics.costs.compute_s == work[-1].forward_s


def stats(*devices: tuple[int, int, float]) -> IOStats:
    """Bytes read, bytes written and busy seconds of each device."""

    def direction(nbytes: int) -> DirectionStats:
        return DirectionStats(
            bytes=nbytes,
            operations=1,
            errors=0,
            latency_s=0.0,
            max_latency_s=0.0,
            bounced_bytes=0,
            busy_s=0.0,
            alone_s=0.0,
            alone_bytes=0,
            histogram=(),
        )

    return IOStats(
        backend="threads",
        devices=tuple(
            DeviceStats(
                device=number,
                idle_s=0.0,
                busy_s=busy,
                mean_depth=1.0,
                inflight=0,
                max_inflight=1,
                inflight_bytes=0,
                max_inflight_bytes=0,
                read=direction(read),
                write=direction(written),
                sync=direction(0),
            )
            for number, (read, written, busy) in enumerate(devices)
        ),
    )


def test_the_busiest_of_the_disks_tells_how_long_a_step_took_them() -> None:
    done = disk_work(stats((100, 50, 1.0)), stats((300, 60, 1.5), (40, 20, 2.0)))
    assert (done.read_bytes, done.written_bytes, done.busy_s) == (240, 30, 2.0)
    assert done == replace(done, link=DISK)

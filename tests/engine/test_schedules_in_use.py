"""The rate in use, the rate reported and the schedule agree: first step, skipped steps, after a resume (E-08, D-11)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import settings
from torch import nn

from lamina.engine import initialize
from lamina.engine.lr_schedules import SCHEDULES, make_schedule
from lamina.zero import get_full

PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "total_num_steps": 12},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 12},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3},
}


class Weights(nn.Module):
    """Its gradient is 1 everywhere, so Adam without decay moves every weight by the rate in use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def config_for(kind: str, params: dict[str, Any], lr: float = 1e-2) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "eps": 0.0}}
    return settings(optimizer=optimizer, scheduler={"type": kind, "params": params})


def rates_in_use(engine: Any, count: int) -> list[float]:
    """Derived from how far a step moves; the reported rates must be the same."""
    found = []
    for _ in range(count):
        before = get_full(engine.module.weight, "master").double()
        reported = engine.get_lr()
        engine.backward(engine())
        engine.step()
        moved = (before - get_full(engine.module.weight, "master").double()).mean().item()
        assert reported[0] == pytest.approx(moved, rel=1e-4, abs=5e-9)
        assert engine.metrics().lr == reported[0]
        found.append(moved)
    return found


@pytest.mark.parametrize("kind", PARAMS)
def test_d11_the_rate_in_use_follows_the_schedule_also_after_a_resume(kind: str, tmp_path: Path) -> None:
    group = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    pure = make_schedule(kind, PARAMS[kind], group)
    wanted = [pure.rate(step) for step in range(12)]
    with initialize(Weights(), config=config_for(kind, PARAMS[kind]))[0] as engine:
        before = rates_in_use(engine, 7)
        engine.save_checkpoint(tmp_path)
    with initialize(Weights(), config=config_for(kind, PARAMS[kind]))[0] as engine:
        engine.load_checkpoint(tmp_path)
        after = rates_in_use(engine, 5)
    assert before + after == pytest.approx(wanted, rel=1e-4, abs=5e-9)
    assert set(PARAMS) == set(SCHEDULES)


def test_d11_torchs_schedules_go_on_too(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])

    config = config_for("WarmupLR", PARAMS["WarmupLR"])
    del config["scheduler"]
    with initialize(Weights(), config=config, lr_scheduler=schedule)[0] as engine:
        straight = rates_in_use(engine, 12)
    with initialize(Weights(), config=config, lr_scheduler=schedule)[0] as engine:
        first = rates_in_use(engine, 7)
        engine.save_checkpoint(tmp_path)
    with initialize(Weights(), config=config, lr_scheduler=schedule)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert first + rates_in_use(engine, 5) == straight


def test_a_schedule_that_is_not_loaded_starts_anew(tmp_path: Path) -> None:
    kind, params = "WarmupDecayLR", PARAMS["WarmupDecayLR"]
    with initialize(Weights(), config=config_for(kind, params))[0] as engine:
        rates_in_use(engine, 7)
        engine.save_checkpoint(tmp_path)
    with initialize(Weights(), config=config_for(kind, params))[0] as engine:
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.last_epoch == 0
        assert engine.global_steps == 7


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("peak", [None, 2e-6])
def test_e08_the_peak_is_the_optimizers_rate_and_step_1_uses_the_first_value(warmup: int, peak: float | None) -> None:
    params: dict[str, Any] = {"warmup_num_steps": warmup} | ({} if peak is None else {"warmup_max_lr": peak})
    with initialize(Weights(), config=config_for("WarmupLR", params, lr=5e-7))[0] as engine:
        assert engine.get_lr() == [0.0 if warmup else peak or 5e-7]
        rates = rates_in_use(engine, 12)
        assert rates[0] == pytest.approx(0.0 if warmup else peak or 5e-7, rel=1e-4, abs=1e-12)
        assert rates[-1] == pytest.approx(peak or 5e-7, rel=1e-4)

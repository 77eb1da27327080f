"""fp16: the loss scale, skipped steps that leave every bit, and the same numbers on every tier (C-08)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, differences, on_nvme, settings, train_with_engine

from lamina.engine import initialize
from lamina.engine.loss_scale import LossScaleError
from lamina.zero import get_full

SMALL = {"width": 32, "hidden": 64, "blocks": 2}


def fp16(power: int = 12, **changes: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1, **changes}}


def everything(engine: Any) -> list[torch.Tensor]:
    planes = ("param", "master", "exp_avg", "exp_avg_sq")
    return [get_full(parameter, plane) for parameter in engine.module.parameters() for plane in planes]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", [{}, {"param": "none"}, {"optimizer": "cpu"}])
def test_fp16_is_bit_equal_across_tiers(placement: dict[str, str], accumulation: int, tmp_path: Path) -> None:
    common = {**fp16(), "gradient_accumulation_steps": accumulation}
    in_memory = train_with_engine(settings(**common), **SMALL)
    tiered = train_with_engine(settings(**common, **on_nvme(tmp_path, **placement)), **SMALL)
    assert list(differences(tiered, in_memory)) == []


def test_the_scale_does_not_show_in_the_numbers() -> None:
    """A power of two scales gradients exactly, as long as none overflows or vanishes."""
    low, high = (train_with_engine(settings(**fp16(power)), **SMALL) for power in (9, 11))
    assert low[0] == pytest.approx(high[0], rel=1e-3)


@pytest.mark.parametrize("tier", ["memory", "nvme"])
def test_c08_skipped_steps_change_no_bit_and_do_not_advance_the_schedule(tier: str, tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
    config = settings(**fp16(40), scheduler=schedule, **(on_nvme(tmp_path) if tier == "nvme" else {}))
    with initialize(build(**SMALL), config=config)[0] as engine:
        before, first_rate = everything(engine), engine.get_lr()
        scales = []
        while True:
            scales.append(engine.loss_scale)
            engine.backward(engine(*batch(engine.global_steps)))
            engine.step()
            if engine.was_step_applied():
                break
            assert engine.skipped_steps == engine.global_steps == len(scales)
            assert engine.get_lr() == first_rate
            assert engine.metrics().skipped
            assert all(map(torch.equal, everything(engine), before))
        assert engine.skipped_steps >= 10
        assert scales == [2.0 ** (40 - step) for step in range(len(scales))]
        assert engine.get_lr() != first_rate
        assert engine.global_steps == engine.skipped_steps + 1
        # Bias correction counts only steps that were taken: the first moves every weight by about its rate, which is 0 here.
        assert set(engine.optimizer.param_steps.values()) == {1}


def test_c08_an_overflow_at_the_least_scale_is_an_error_and_training_can_be_looked_at() -> None:
    config = settings(**fp16(40, min_loss_scale=2.0**39))
    with initialize(build(**SMALL), config=config)[0] as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.loss_scale == 2.0**39
        before = everything(engine)
        engine.backward(engine(*batch(0)))
        with pytest.raises(LossScaleError, match="least loss scale"):
            engine.step()
        assert all(map(torch.equal, everything(engine), before))


def test_a_fixed_scale_skips_and_stays() -> None:
    with initialize(build(**SMALL), config=settings(**fp16(loss_scale=2.0**40)))[0] as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        assert (engine.skipped_steps, engine.loss_scale) == (1, 2.0**40)


def test_bf16_checks_overflow_when_asked_to() -> None:
    config = settings(bf16={"enabled": True, "check_grad_overflow": True})
    with initialize(build(**SMALL), config=config)[0] as engine:
        before = everything_bf16(engine)
        engine.backward(engine(*batch(0)) * float("inf"))
        engine.step()
        assert engine.skipped_steps == 1
        assert all(map(torch.equal, everything_bf16(engine), before))


def everything_bf16(engine: Any) -> list[torch.Tensor]:
    return [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg")]


def test_auto_cast_casts_floating_inputs_only() -> None:
    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            assert (x.dtype, extra["f"].dtype, extra["i"].dtype) == (torch.float16, torch.float16, torch.int64)
            return self.linear(x).float().mean()

    config = settings(fp16={"enabled": True, "auto_cast": True})
    with initialize(Probe(), config=config)[0] as engine:
        engine(torch.ones(2, 8), {"f": torch.ones(1), "i": torch.ones(1, dtype=torch.int64)})


def test_the_checkpoint_carries_the_scale(tmp_path: Path) -> None:
    config = settings(**fp16(40))
    with initialize(build(**SMALL), config=config)[0] as engine:
        for _ in range(3):
            engine.backward(engine(*batch(0)))
            engine.step()
        engine.save_checkpoint(tmp_path)
    with initialize(build(**SMALL), config=config)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert (engine.loss_scale, engine.skipped_steps, engine.global_steps) == (2.0**37, 3, 3)

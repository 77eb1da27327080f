"""Configs in the shapes that people publish for DeepSpeed train unchanged, with the losses of a plain PyTorch loop."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from public_configs import CONFIGS, placed
from small_model import batch, build

from lamina.engine import initialize
from lamina.engine.lr_schedules import make_schedule


class Plain:
    """The loop that a config describes: compute in its format, fp32 masters, torch's optimizer, clipping, loss scale."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.compute_dtype]
        self.model = build()
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.to(self.dtype)
        block = config.optimizer
        if block.type == "SGD":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.masters, **block.params)
        else:
            given = block.params
            rest = {"lr": given.lr, "betas": given.betas, "eps": given.eps, "weight_decay": given.weight_decay}
            kind = torch.optim.AdamW if block.adamw_mode else torch.optim.Adam
            self.optimizer = kind(self.masters, **rest)
        schedule = config.scheduler
        self.schedule = schedule and make_schedule(schedule.type, schedule.params.model_dump(), self.optimizer)

    def step(self, first: int, scale: float) -> list[float]:
        """One window of micro-batches from number ``first`` on; their losses."""
        count = self.config.gradient_accumulation_steps
        losses, sums = [], [torch.zeros_like(master) for master in self.masters]
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        for micro in range(count):
            loss = self.model(*batch(first + micro))
            (loss.float() / count * scale).backward()
            losses.append(loss.item())
            for parameter, into in zip(self.model.parameters(), sums, strict=True):
                into += parameter.grad.float()
                parameter.grad = None
        for master, total in zip(self.masters, sums, strict=True):
            master.grad = total / scale
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(m.grad) for m in self.masters]))
        if not torch.isfinite(norm):
            return losses
        if self.config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(self.masters, self.config.gradient_clipping)
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        return losses


@pytest.mark.parametrize("name", CONFIGS)
def test_public_configs_train_as_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    given = placed(CONFIGS[name], tmp_path)
    before = copy.deepcopy(given)
    engine = initialize(build(), config=given)[0]
    assert given == before, "the caller's config is not changed"
    with engine:
        plain = Plain(engine.config)
        count = engine.gradient_accumulation_steps()
        for step in range(5):
            scale, losses = engine.loss_scale, []
            for micro in range(count):
                loss = engine(*batch(step * count + micro))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            exact = {"rel": 2e-6} if plain.dtype is torch.float32 else {"rel": 2e-3}
            assert losses == pytest.approx(plain.step(step * count, scale), **exact), f"step {step}"
            assert engine.get_lr() == pytest.approx([g["lr"] for g in plain.optimizer.param_groups])
        assert engine.skipped_steps < 3

"""The least budgets that a refusal names are accepted, and training goes through them."""

import re
from pathlib import Path

import pytest
import torch
from small_model import batch, build, differences, on_nvme, settings, train_with_engine, train_with_torch

from lamina.engine import initialize
from lamina.tiers import BudgetError, PlacementError

SHAPE = {"width": 96, "hidden": 160, "blocks": 5, "vocab": 640}  # the tied embedding is larger than a block


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}, {"bf16": {"enabled": True}}])
def test_the_least_that_is_named_works(changes: dict, tmp_path: Path) -> None:
    config = settings(**changes, **on_nvme(tmp_path, device_bytes=491_520, host_bytes=1))
    with pytest.raises(PlacementError) as refused:
        initialize(build(**SHAPE), config=config)
    least = int(re.search(r"Write ([\d,]+) or more", str(refused.value))[1].replace(",", ""))
    config["tiers"]["host_bytes"] = least
    tiered = train_with_engine(config, steps=6, **SHAPE)
    assert list(differences(tiered, train_with_engine(settings(**changes), steps=6, **SHAPE))) == []


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_training_goes_on_after_a_forward_in_inference_mode(param: str, tmp_path: Path) -> None:
    model = build()
    losses = []
    with initialize(model, config=settings(**on_nvme(tmp_path, param=param)))[0] as engine:
        for index in range(3):
            with torch.inference_mode():
                engine(*batch(9))
            loss = engine(*batch(index))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses == train_with_torch(steps=3)[0]


@pytest.mark.parametrize("key", ["host_bytes", "device_bytes"])
def test_a_budget_beyond_the_machine_is_refused_with_the_numbers(key: str, tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path / "nvme", **{key: 1 << 50}))
    with pytest.raises(
        BudgetError, match=rf"tiers\.{key}.*1,125,\d{{3}},\d{{3}},\d{{3}},\d{{3}} bytes.*more can be had"
    ):
        initialize(build(), config=config)
    assert list(tmp_path.iterdir()) == []

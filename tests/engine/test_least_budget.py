"""The least budgets that a refusal names are accepted, and training goes through them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, differences, on_nvme, settings, train_with_engine, train_with_torch
from torch import nn

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


class Table(nn.Module):
    """An embedding that is larger than all blocks."""

    def __init__(self, rows: int = 5003, width: int = 17, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)
        self.vocab = rows

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.head(x) * targets.unsqueeze(-1)).square().mean()


def table(**sizes: int) -> Table:
    torch.manual_seed(0)
    return Table(**sizes)


def least_named(model: nn.Module, config: dict[str, Any]) -> dict[str, int]:
    """What a refusal says to write, by key; nothing where there is none."""
    try:
        initialize(model, config=config)[0].close()
    except PlacementError as refusal:
        told = re.findall(r"tiers\.(\w+_bytes) is [\d,]+, but.*?Write ([\d,]+) or more", str(refusal))
        return {key: int(least.replace(",", "")) for key, least in told}
    return {}


@pytest.mark.parametrize("place", ["auto", "nvme"])
@pytest.mark.parametrize("sizes", [{}, {"rows": 70_000, "blocks": 6}, {"rows": 300, "width": 48, "blocks": 40}])
def test_a_byte_less_than_what_is_named_is_refused_with_a_figure_that_works(
    sizes: dict[str, int], place: str, tmp_path: Path
) -> None:
    config = settings(**on_nvme(tmp_path, device_bytes=1, host_bytes=1))
    if place == "auto":
        config["zero_optimization"] = {"stage": 3}
    least = least_named(table(**sizes), config)
    assert set(least) == {"device_bytes", "host_bytes"}
    config["tiers"] |= least
    assert least_named(table(**sizes), config) == {}
    for key in least:
        short = {**config, "tiers": {**config["tiers"], key: least[key] - 1}}
        told = least_named(table(**sizes), short)
        # With state in memory, more of one tier can stand for less of the other.
        assert told == {key: least[key]} if place == "nvme" else told, key
        short["tiers"] |= told
        assert least_named(table(**sizes), short) == {}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_fits_memory_without_update_buffers_is_not_asked_to_have_room_for_them(
    accumulation: int, tmp_path: Path
) -> None:
    changes = {"gradient_accumulation_steps": accumulation}
    config = settings(**changes, tiers={"nvme": [str(tmp_path)], "device_bytes": 400_000, "host_bytes": 1})
    least = least_named(table(), config)
    numel = sum(parameter.numel() for parameter in table().parameters())
    assert least["host_bytes"] < 1.1 * 4 * 3 * numel  # moments and gradients
    config["tiers"] |= least
    tiered = train_with_engine(config, model=table())
    assert list(differences(tiered, train_with_engine(settings(**changes), model=table()))) == []

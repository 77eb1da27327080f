"""What the kernel says a process holds: state on NVMe is not in memory, and budgets are of resident bytes (B-07, B-09)."""

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import on_nvme, settings
from torch import nn

from lamina.engine import initialize
from lamina.tiers.memory.heap import Heap

WIDTH, BLOCKS = 768, 20
NUMEL = WIDTH * WIDTH * BLOCKS
"""12 M parameters: 47 MB a plane."""
SLACK = 12 << 20
"""Activations, a gradient on its way, the allocator's and the I/O's own."""


def resident_bytes() -> int:
    gc.collect()
    Heap().give_back()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def train(config: dict[str, Any]) -> tuple[int, dict[str, dict[str, int]]]:
    """Bytes that training holds after 5 steps, and what the plan says of each tier's items."""
    before = resident_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    with initialize(model, config=config)[0] as engine:
        for _ in range(5):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        tiers = engine.plan.placement["tiers"]
        return resident_bytes() - before, {tier: dict(tiers[tier]["items"]) for tier in ("device", "host")}


def test_b09_state_on_nvme_is_not_in_memory(tmp_path: Path) -> None:
    """The saving is the moments' bytes less the buffers that the plan names."""
    train(settings())  # what torch and the kernels take once
    in_memory, _ = train(settings(**on_nvme(tmp_path, param="none", optimizer="cpu")))
    for param, planes in (("none", 2), ("nvme", 3)):
        held, items = train(settings(**on_nvme(tmp_path, param=param)))
        buffers = items["host"].get("update buffers", 0) + items["device"].get("window of fetched groups", 0)
        assert in_memory - held >= planes * 4 * NUMEL - buffers - SLACK, (param, in_memory, held, items)


@pytest.mark.parametrize("host_bytes", [60 << 20, 140 << 20])
def test_b07_a_host_budget_of_less_than_the_state_is_kept_by_the_process(host_bytes: int, tmp_path: Path) -> None:
    """Parameters, two moments and gradients are 189 MB."""
    train(settings())
    held, _ = train(settings(tiers={"nvme": [str(tmp_path)], "device_bytes": 16 << 20, "host_bytes": host_bytes}))
    assert held <= host_bytes + (16 << 20) + SLACK

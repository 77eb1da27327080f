"""Run on every rank: one rank edits gathered parameters; each rank writes what it then reads to a file of its own."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from lamina.engine import initialize
from lamina.zero import GatheredParameters, get_full


def edited(stage: int, tiers: Mapping[str, object], modifier: int) -> list[torch.Tensor]:
    """The first matrix, which ``modifier`` doubles, and the second, to which every rank adds a number of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "tiers": tiers,
    }
    weights = list(model.parameters())
    rank = dist.get_rank()
    with initialize(model, config=config)[0] as engine:
        with GatheredParameters(model, modifier_rank=modifier), torch.no_grad():
            if rank == modifier:
                weights[0].mul_(2)
            weights[1].add_(rank + 1)
        engine.backward(engine(torch.ones(1, 5)).sum())
        found = [get_full(weight) for weight in weights]
        engine.step()
    return [values for values in found if values is not None]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    nvme = {"nvme": [str(folder / "nvme")], "placement": {"param": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}}
    found = {
        (stage, placed, modifier): edited(stage, nvme if placed == "nvme" else {}, modifier)
        for stage, placed in ((1, "memory"), (3, "memory"), (3, "nvme"))
        for modifier in range(dist.get_world_size())
    }
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run on every rank: odd models in several placements on every rank; rank 0 prints what differs as JSON on the last line."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "zero_models"))
from both_ways import DECAY, LR, built, call, memory, nvme
from odd_models import MODELS, WIDTH, Stack, tokens

from lamina.engine import initialize
from lamina.zero import Init, get_full

STEPS = 3
Build = Callable[[], nn.Module]


class Held(Stack):
    """While later modules are built, rank 1 alone has another tensor over a weight's memory, as gloo's threads may."""

    def __init__(self) -> None:
        super().__init__()
        held = [self.head.weight.detach()]  # under Init: brings it back
        if dist.get_rank() != 1:
            held.clear()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.embed.requires_grad_(True)  # brings another one of that shape back
        self.last = nn.Linear(WIDTH, WIDTH)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(super().run(index, x)))


def inputs(step: int, rank: int) -> tuple[int, torch.Tensor]:
    """Ranks take the same turns (first number) with other data."""
    return step, tokens(step * dist.get_world_size() + rank)[1]


def train(build: Build, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = built(build)
    with initialize(module, config=config)[0] as engine:
        for step in range(STEPS):
            engine.backward(call(engine, inputs(step, dist.get_rank())))
            engine.step()
        return {
            name: get_full(parameter, "master" if parameter.requires_grad else "param")
            for name, parameter in module.named_parameters()
        }


def train_keeping_small_parameters(build: Build, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """With parameters of up to 64 elements whole on every rank."""
    zero = config["zero_optimization"] | {"stage3_param_persistence_threshold": 64}
    return train(build, config | {"zero_optimization": zero})


def under_init(build: Build) -> Build:
    def run() -> nn.Module:
        torch.manual_seed(dist.get_rank())  # rank 0's values count
        with Init():
            return build()

    return run


def reference(build: Build) -> dict[str, torch.Tensor]:
    """All ranks' micro-batches in one process, plain PyTorch."""
    world_size = dist.get_world_size()
    module = built(build)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=LR,
        weight_decay=DECAY,
        fused=True,
    )
    for step in range(STEPS):
        for rank in range(world_size):
            (call(module, inputs(step, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def compared(
    name: str, trained: dict[str, dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    first = next(iter(trained.values()))
    for run, found in trained.items():
        yield {
            "model": name,
            "run": run,
            "differs": [key for key in found if not torch.equal(found[key], first[key])],
            "shapes": all(found[key].shape == wanted[key].shape for key in wanted),
            "error": max(
                ((found[key] - wanted[key]).abs() / (wanted[key].abs() + 1e-3)).max().item()
                for key in wanted
                if wanted[key].numel()
            ),
        }


def main(folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: list[dict[str, Any]] = []
    for name in names:
        build = (MODELS | {"Held": Held})[name]
        runs: dict[str, Callable[[Build], dict[str, torch.Tensor]]] = {
            "stage 0": lambda build: train(build, memory(zero_optimization={"stage": 0})),
            "stage 2": lambda build: train(build, memory(zero_optimization={"stage": 2})),
            "stage 3": lambda build: train(build, memory()),
            "stage 3, small window": lambda build: train(build, nvme(folder, device_bytes=400_000)),
            "stage 3, small ones whole": lambda build: train_keeping_small_parameters(build, memory()),
            "stage 3, small ones whole, nvme": lambda build: train_keeping_small_parameters(build, nvme(folder)),
            "stage 3, built under Init": lambda build: train(under_init(build), memory()),
        }
        trained = {run: start(build) for run, start in runs.items()}
        if dist.get_rank() == 0:  # it alone compares
            results += list(compared(name, trained, reference(build)))
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))

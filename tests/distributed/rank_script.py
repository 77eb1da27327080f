"""Run by torchrun: trains the small model in several placements and compares, on rank 0 as JSON on the last line."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.zero import get_full

ODD = {"width": 13, "hidden": 29, "blocks": 3, "vocab": 101}
STEPS = 3
WAYS = ("own", "two losses", "two losses, own", "not a scalar, own")


def placements(folder: str) -> dict[str, dict]:
    return {
        "stage 0": {"zero_optimization": {"stage": 0}},
        "stage 1": {"zero_optimization": {"stage": 1}},
        "stage 2": {"zero_optimization": {"stage": 2}},
        "stage 2, optimizer on nvme": on_nvme(folder, optimizer="nvme")
        | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
        "stage 3": {},
        "stage 3, host": {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            }
        },
        "stage 3, nvme": on_nvme(folder),
    }


def backward(engine: Any, loss: torch.Tensor, way: str) -> None:
    """Ways that must all give the same bits: the shares of the losses are powers of two, or meet before the graph."""
    if way == "own":
        engine.scale(loss).backward()
    elif way == "two losses":
        engine.backward(loss * 0.5, retain_graph=True)
        engine.backward(loss * 0.5)
    elif way == "two losses, own":
        engine.scale(loss * 0.5).backward(retain_graph=True)
        engine.scale(loss * 0.5).backward()
    elif way == "not a scalar, own":
        engine.scale(torch.stack([loss, loss])).backward(torch.tensor([0.25, 0.75]))
    else:
        engine.backward(loss)


def train(config: dict, accumulation: int, shape: dict, way: str = "") -> tuple[list[torch.Tensor], float, int]:
    """Final masters, the norm of the last gradient, and bytes of parameters that the last step fetched."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(**shape)
    with initialize(model, config=config)[0] as engine:
        take, taken = engine.runtime.executor.take_counters, []
        engine.runtime.executor.take_counters = lambda: (taken.append(take()), taken[-1])[1]
        for index in range(STEPS * accumulation):
            backward(engine, engine(*batch(index * world_size + rank, model.vocab)), way)
            engine.step()
        masters = [get_full(parameter, "master") for parameter in model.parameters()]
        return masters, engine.get_global_grad_norm(), taken[-1].fetched_bytes


def reference(accumulation: int, shape: dict) -> list[torch.Tensor]:
    """All ranks' micro-batches in one process, plain PyTorch."""
    world_size = dist.get_world_size()
    model = build(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        for micro in range(accumulation * world_size):
            loss = model(*batch(step * accumulation * world_size + micro, model.vocab))
            (loss / (accumulation * world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def cases(folder: str, accumulation: int, shape: dict) -> list[tuple[str, dict, str]]:
    """Name, config and way of calling backward."""
    found = [(name, changes, "") for name, changes in placements(folder).items()]
    if shape:
        stages = {"stage 1": {"zero_optimization": {"stage": 1}}, "stage 3": {}}
        # Beside another micro-batch's gradient, two halves are added in another order than the whole.
        ways = [way for way in WAYS if accumulation == 1 or not way.startswith("two losses")]
        found += [(f"{name}, {way}", changes, way) for name, changes in stages.items() for way in ways]
    return found


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    # Lengths that divide, with every choice, are in the grid; here they stand beside those that do not.
    for accumulation, shape in ((1, {}), (1, ODD), (2, ODD)):
        runs = []
        for name, changes, way in cases(folder, accumulation, shape):
            config = settings(gradient_accumulation_steps=accumulation, **changes)
            runs.append((name, *train(config, accumulation, shape, way)))
        if dist.get_rank() == 0:
            wanted = reference(accumulation, shape)
            first = runs[0][1]
            for name, found, norm, fetched_bytes in runs:
                errors = [((a - b).abs() / (b.abs() + 1e-3)).max().item() for a, b in zip(found, wanted, strict=True)]
                results.append(
                    {
                        "placement": name,
                        "accumulation": accumulation,
                        "odd": bool(shape),
                        "error": max(errors),
                        "same_bits": all(torch.equal(a, b) for a, b in zip(found, first, strict=True)),
                        "norm": norm,
                        "fetched_bytes": fetched_bytes,
                    }
                )
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

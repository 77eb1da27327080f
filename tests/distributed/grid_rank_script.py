"""Run on every rank, or alone: cases of the grid on every rank; rank 0 writes what came out as JSON into a file."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from grid_cases import Case, all_cases, covering_cases
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import grid_reference
from small_model import SmallModel, batch, build

from lamina.engine import initialize
from lamina.zero import get_full

STEPS = 2
SHAPE = {"width": 64, "hidden": 128, "blocks": 2, "vocab": 256}  # three groups; every length is a multiple of 16


def model() -> SmallModel:
    return build(**SHAPE)


def train(case: Case, rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    module = model()
    with initialize(module, config=case.config(folder), handle_signals=False)[0] as engine:
        for index in range(STEPS * case.accumulation):
            engine.backward(engine(*batch(index * world_size + rank)))
            engine.step()
        return {name: get_full(parameter, "master") for name, parameter in module.named_parameters()}


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter, relative to the parameter's largest element."""
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted)


def main(which: str, folder: str, result: Path) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world_size > 1 else 0
    in_memory: dict[Case, dict[str, torch.Tensor]] = {}
    plain: dict[Case, dict[str, torch.Tensor]] = {}
    results = []
    for case in all_cases() if which == "all" else covering_cases():
        numbers = case.numbers
        if numbers not in in_memory:
            in_memory[numbers] = train(numbers, rank, world_size, folder)
            if rank == 0:  # it alone compares
                plain[numbers] = grid_reference.train(case, model, batch, world_size, STEPS)
        began = time.perf_counter()
        found = train(case, rank, world_size, folder)
        if rank:
            continue
        results.append(
            {
                "case": str(case),
                "dtype": case.dtype,
                "same_bits": all(torch.equal(found[name], in_memory[numbers][name]) for name in found),
                "error": error(found, plain[numbers]),
                "equals_plain": all(torch.equal(found[name], plain[numbers][name]) for name in found),
                "seconds": time.perf_counter() - began,
            }
        )
    if rank == 0:
        result.write_text(json.dumps(results))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

"""Run on every rank, or alone: trains with clipping in many placements; every rank writes the bits that came out as JSON."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.zero import get_full

STEPS = 2
SHAPE = {
    "width": 72,
    "hidden": 203,
    "blocks": 3,
    "vocab": 131,
}  # parameters of several blocks of the norm, and odd ones


def placements(folder: str, itemsize: int, world_size: int) -> dict[str, dict[str, Any]]:
    stage = {number: {"zero_optimization": {"stage": number}} for number in range(4)}
    shares = {"exp_avg": {"host": 0.4, "nvme": 0.6}, "exp_avg_sq": {"host": 0.4, "nvme": 0.6}, "param": "host"}
    finer, finest = (
        (55_000 * itemsize, 30_000 * itemsize) if world_size == 1 else (100_000 * itemsize, 66_000 * itemsize)
    )
    small = on_nvme(folder)
    small["zero_optimization"]["sub_group_size"] = 5000
    on_stage_2 = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    return {
        **{f"stage {number}": changes for number, changes in stage.items()},
        "stage 3, some whole": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 300}},
        "stage 3, host": on_nvme(folder, param="cpu", optimizer="cpu"),
        "stage 3, nvme": on_nvme(folder),
        "stage 3, nvme, finer groups": on_nvme(folder, device_bytes=finer),
        "stage 3, nvme, finest groups": on_nvme(folder, device_bytes=finest),
        "stage 3, nvme, small sub-groups": small,
        "stage 3, shares": stage[3] | {"tiers": {"nvme": [folder], "placement": shares}},
        "stage 2, nvme": {"zero_optimization": on_stage_2, "tiers": {"nvme": [folder]}},
    }


def train(config: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    model, norms = build(**SHAPE), []
    with initialize(model, config=config, handle_signals=False)[0] as engine:
        for index in range(STEPS):
            engine.backward(engine(*batch(index * world_size + rank, model.vocab)))
            engine.step()
            norms.append(engine.get_global_grad_norm().hex())
        groups = len(engine.runtime.groups)
        masters = [get_full(parameter, "master") for parameter in model.parameters()]
    weights = hashlib.sha256(b"".join(master.numpy().tobytes() for master in masters if master is not None))
    return {"norms": norms, "weights": weights.hexdigest(), "groups": groups}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world_size > 1 else 0
    results = {}
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        for name, changes in placements(str(folder / "state"), itemsize, world_size).items():
            config = (
                settings(**changes)
                | {"gradient_clipping": 0.05}
                | ({dtype: {"enabled": True}} if dtype != "fp32" else {})
            )
            results[f"{dtype}, {name}"] = train(config, rank, world_size)
    (folder / f"result{rank}").write_text(json.dumps(results))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

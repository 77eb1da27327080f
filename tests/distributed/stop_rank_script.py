"""Run by torchrun: one rank gets SIGTERM, all stop after the same micro-batch and save; they then go on. Argument: folder."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings

from lamina.engine import TrainingEngine, initialize

SMALL = {"width": 16, "hidden": 32, "blocks": 2}


def start(folder: str) -> TrainingEngine:
    config = settings(gradient_accumulation_steps=2, **on_nvme(folder + "/n"))
    return initialize(build(**SMALL), config=config, save_on_stop=folder + "/c")[0]


def train(engine: TrainingEngine, *, stop_at: int | None = None) -> list[float]:
    losses = []
    while engine.global_steps < 4:
        if engine.micro_steps == stop_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = engine(*batch(engine.micro_steps * dist.get_world_size() + dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with start(folder) as engine:
        wanted = train(engine)
    code = None
    try:
        train(start(folder), stop_at=2)
    except SystemExit as stop:
        code = stop.code
    with start(folder) as engine:
        engine.load_checkpoint(folder + "/c")
        micro_steps = engine.micro_steps
        right = train(engine) == wanted[micro_steps:]
    result = {"code": code, "micro_steps": micro_steps, "right": right}
    (Path(folder) / f"result{dist.get_rank()}").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

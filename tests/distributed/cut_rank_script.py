"""Run by forked ranks: all are killed when one has not yet committed the step that the others have. Arguments: folder, mode."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings
from train_until_killed import hold_commit

from lamina.engine import TrainingEngine, initialize

SMALL = {"width": 16, "hidden": 32, "blocks": 2}
CUT, LAST = 3, 5


def start(folder: str, **options: object) -> TrainingEngine:
    config = settings(**on_nvme(folder, keep_state=True))
    return initialize(build(**SMALL), config=config, **options)[0]


def train(engine: TrainingEngine, last: int) -> list[float]:
    losses = []
    while engine.global_steps < last:
        loss = engine(*batch(engine.global_steps * dist.get_world_size() + dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def be_cut(folder: str) -> None:
    engine = start(folder)
    assert engine.runtime.store is not None
    if dist.get_rank() == 1:
        hold_commit(engine, CUT)
    train(engine, CUT)
    if dist.get_rank() == 0:
        engine.runtime.store.settle()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: str) -> dict[str, object]:
    with start(folder + "/straight") as engine:
        wanted = train(engine, LAST)
    with start(folder + "/cut", resume=True) as engine:
        first = engine.global_steps
        right = train(engine, LAST) == wanted[first:]
    with start(folder + "/cut", resume=True) as engine:
        return {"first": first, "right": right, "then": engine.global_steps}


def main(folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if mode == "cut":
        be_cut(folder + "/cut")
    result = go_on(folder)
    (Path(folder) / f"result{dist.get_rank()}").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Run on every rank: memory of each rank while a model is built under Init, trained, saved and loaded; every rank writes its own
figures."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from lamina.engine import initialize
from lamina.zero import Init

WIDTH, BLOCKS = 1024, 16
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
BUCKETS = 3  # one being filled, two under way
WINDOW = 2
STEPS = 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def high_water() -> int:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset() -> int:
    """Count the peak from here on; what it is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def config(device_bytes: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "tiers": {"device_bytes": device_bytes},
    }


def train_a_little() -> None:
    """Touch the code and the pools that any training touches."""
    with initialize(nn.Linear(WIDTH, WIDTH), config=config(BLOCK_BYTES * 6))[0] as engine:
        engine.backward(engine(torch.ones(2, WIDTH)).mean())
        engine.step()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train_a_little()
    figures = {}
    before = reset()
    with Init():
        model = Stack()
    figures["build"] = high_water() - before
    engine = initialize(model, config=config((WINDOW + BUCKETS) * (BLOCK_BYTES + 65536)))[0]
    figures["initialize"] = high_water() - before
    reset()
    with engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
        figures["train"] = high_water() - before
        engine.save_checkpoint(folder / "saved")
        figures["save"] = high_water() - before
        runtime = engine.runtime
        figures["device"], figures["host"] = (arena.report().peak for arena in (runtime.device, runtime.host))
        figures["items"] = {"device": runtime.placement.device_items, "host": runtime.placement.host_items}
    del model, engine, runtime
    gc.collect()
    reset()
    with Init():
        model = Stack()
    with initialize(model, config=config((WINDOW + BUCKETS) * (BLOCK_BYTES + 65536)))[0] as engine:
        reset()
        engine.load_checkpoint(folder / "saved")
        figures["load"] = high_water() - before
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    (folder / os.environ.get("RANK", "0")).write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

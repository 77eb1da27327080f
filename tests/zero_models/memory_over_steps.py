"""Trains with evaluation and saves mixed in, and prints as JSON what memory was in use every ten steps: resident bytes of this
process, Python's objects and the host tier's bytes.

    PYTHON memory_over_steps.py STEPS memory|nvme FOLDER
"""

import gc
import json
import mmap
import shutil
import sys
from pathlib import Path

import torch
from both_ways import built, call, memory, nvme
from odd_models import MODELS, tokens

from lamina.engine import initialize


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def train(steps: int, where: str, folder: Path) -> dict[str, list[int]]:
    module = built(MODELS["SkipsMiddle"])
    config = memory() if where == "memory" else nvme(folder / "state", device_bytes=40_000)
    samples: dict[str, list[int]] = {"resident": [], "objects": [], "host": []}
    with initialize(module, config=config)[0] as engine:
        for step in range(steps):
            engine.backward(call(engine, tokens(step)))
            engine.step()
            if step % 5 == 4:
                module.eval()
                with torch.no_grad():
                    call(engine, tokens(step + 1000))
                module.train()
            if step % 10 == 9:
                engine.save_checkpoint(folder / "saved", tag="last")
                shutil.rmtree(folder / "saved")
                gc.collect()
                samples["resident"].append(resident_bytes())
                samples["objects"].append(len(gc.get_objects()))
                samples["host"].append(engine.runtime.host.report().used)
    return samples


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))))

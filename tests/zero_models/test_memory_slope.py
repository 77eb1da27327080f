"""Memory does not grow over steps with evaluation and saves mixed in."""

import gc
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from both_ways import built, call, memory, nvme
from odd_models import MODELS, tokens

from lamina.engine import initialize

KIB = 1 << 10


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.timeout(280)
@pytest.mark.parametrize("where", ["memory", "nvme"])
@pytest.mark.parametrize(
    ("steps", "allowed"),
    # The kernel's count is coarse over few steps: what a thread's first allocation maps is as much as 300 steps may leak.
    [(60, 2048 * KIB), pytest.param(300, 512 * KIB, marks=pytest.mark.slow)],
)
def test_steps_with_evaluation_and_saves_need_no_more_memory(
    steps: int, allowed: int, where: str, tmp_path: Path
) -> None:
    module = built(MODELS["SkipsMiddle"])
    config = memory() if where == "memory" else nvme(tmp_path / "state", device_bytes=40_000)
    samples, objects, blocks = [], [], []
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
                engine.save_checkpoint(tmp_path / "saved", tag="last")
                shutil.rmtree(tmp_path / "saved")
                gc.collect()
                samples.append(resident_bytes())
                objects.append(len(gc.get_objects()))
                blocks.append(engine.runtime.host.report().used)
    # From the first third on: the first steps fill pools and caches.
    first = len(samples) // 3
    late, late_objects = samples[first:], objects[first:]
    middle = len(late) // 2
    growth = sum(late[middle:]) / len(late[middle:]) - sum(late[:middle]) / middle
    assert growth < allowed, samples
    assert late_objects[-1] - late_objects[0] < 200, objects
    assert len(set(blocks[first:])) == 1, blocks

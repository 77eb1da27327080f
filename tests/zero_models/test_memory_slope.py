"""Memory does not grow over 300 steps with evaluation mixed in."""

import gc
from pathlib import Path

import pytest
import torch
from both_ways import built, call, memory, nvme
from odd_models import MODELS, tokens

from lamina.engine import initialize


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_three_hundred_steps_with_evaluation_need_no_more_memory(where: str, tmp_path: Path) -> None:
    module = built(MODELS["SkipsMiddle"])
    config = memory() if where == "memory" else nvme(tmp_path, device_bytes=40_000)
    samples, objects = [], []
    with initialize(module, config=config)[0] as engine:
        for step in range(300):
            engine.backward(call(engine, tokens(step)))
            engine.step()
            if step % 10 == 9:
                module.eval()
                with torch.no_grad():
                    call(engine, tokens(step + 1000))
                module.train()
                gc.collect()
                samples.append(resident_bytes())
                objects.append(len(gc.get_objects()))
    # From the 100th step on: the first ones fill pools and caches.
    late, late_objects = samples[10:], objects[10:]
    middle = len(late) // 2
    growth = sum(late[middle:]) / len(late[middle:]) - sum(late[:middle]) / middle
    assert growth < 512 << 10, samples
    assert late_objects[-1] - late_objects[0] < 200, objects

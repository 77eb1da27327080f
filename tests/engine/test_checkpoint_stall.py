"""How long saving NVMe-resident state holds training up, printed beside a plain copy of the same bytes; restored bit by bit.

pytest -s -m slow tests/engine/test_checkpoint_stall.py
"""

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamina.engine import initialize
from lamina.zero import get_local

WIDTH = 4096
STATE_BYTES = 12  # parameter, exp_avg and exp_avg_sq in fp32


def engine_for(folder: Path, layers: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiers": {"nvme": [str(folder)], "host_bytes": "1GiB", "device_bytes": "512MiB", "verify": "off"},
    }
    return initialize(model, config=config)[0]


def step(engine: Any) -> float:
    began = time.perf_counter()
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    return time.perf_counter() - began


def digest(engine: Any) -> str:
    found = hashlib.blake2b()
    for parameter in engine.module.parameters():
        for plane in ("param", "exp_avg", "exp_avg_sq"):
            found.update(memoryview(get_local(parameter, plane).contiguous().view(torch.uint8).numpy()).cast("B"))
    return found.hexdigest()


@pytest.mark.parametrize(
    "gigabytes", [0.2, pytest.param(8.0, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["small", "8 GB"]
)
def test_saving_state_on_nvme_holds_training_up_for_less_than_a_copy(gigabytes: float, tmp_path: Path) -> None:
    layers = max(1, round(gigabytes * 1e9 / STATE_BYTES / WIDTH**2))
    nbytes = layers * WIDTH**2 * STATE_BYTES
    stalls: dict[str, list[float]] = {"in the foreground": [], "in the background": []}
    with engine_for(tmp_path / "n", layers) as engine:
        for kind, seconds in stalls.items():
            for _ in range(2):
                step_s = step(engine)
                began = time.perf_counter()
                path = engine.save_checkpoint(tmp_path / "c", background=kind == "in the background", keep_last=1)
                seconds.append(time.perf_counter() - began)
                engine.wait_for_checkpoint()
        wanted = digest(engine)
        pinned = sorted(Path(path).glob("rank0/nvme/gen-*"))
        assert all(file.stat().st_nlink == 2 for file in pinned), "linked, not copied"
        assert sum(file.stat().st_size for file in pinned) >= nbytes
        began = time.perf_counter()
        for file in pinned:
            shutil.copyfile(file, tmp_path / "copy")
            with open(tmp_path / "copy", "rb") as copied:
                os.fsync(copied.fileno())
        copy_s = time.perf_counter() - began
        os.unlink(tmp_path / "copy")
        step(engine)
        engine.load_checkpoint(tmp_path / "c")
        assert digest(engine) == wanted
    for kind, seconds in stalls.items():
        print(f"{nbytes / 1e9:.2f} GB of state, saved {kind}: {', '.join(f'{s * 1e3:.0f}' for s in seconds)} ms")
    print(f"a plain copy of it: {copy_s * 1e3:.0f} ms; a step: {step_s * 1e3:.0f} ms")

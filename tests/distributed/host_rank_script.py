"""Run by torchrun on every host: trains through NVMe with a folder of its own per host; rank 0 writes the masters."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.zero import get_full

STEPS = 3


def main(nvme_path: Path, result: Path) -> None:
    torch.set_num_threads(1)
    model = build(width=48, hidden=96, blocks=3)
    with initialize(model, config=settings(**on_nvme(nvme_path)))[0] as engine:
        ranks = dist.get_rank(), dist.get_world_size()
        for index in range(STEPS):
            engine.backward(engine(*batch(index * ranks[1] + ranks[0])))
            engine.step()
        (result / f"rank{ranks[0]}").write_text(
            f"{engine.local_rank} {os.environ['LOCAL_RANK']} {sorted(p.name for p in (nvme_path / 'default').iterdir())}"
        )
        masters = {name: get_full(parameter, "master") for name, parameter in model.named_parameters()}
    if ranks[0] == 0:
        save_file(masters, result / "masters.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

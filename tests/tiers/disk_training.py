"""A small model whose state lies on two folders that look like disks of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from residual_model import batch, residual_model
from throttled_io import Bucket, DisksIO
from torch import nn

from lamina.aio_native import AsyncIO
from lamina.engine import TrainingEngine, initialize
from lamina.tiers import DiskSpeed, GenerationStore
from lamina.tiers.links.device_identity import DeviceIdentity

WIDTH = 256


def two_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, Bucket]:
    """Two folders that look like disks of 200 MB/s reading and 400 MB/s writing to everything above the file I/O."""
    found = {tmp_path / name: Bucket(read_rate=200e6, write_rate=400e6) for name in "ab"}
    for folder in found:
        folder.mkdir()

    def bucket(path: str | Path) -> Bucket:
        return next(found[folder] for folder in found if Path(path).is_relative_to(folder))

    def identity(path: str) -> DeviceIdentity:
        serial = str(list(found.values()).index(bucket(path)))
        return DeviceIdentity(machine="m", file_system="ext4", model="", serial=serial, capacity_bytes=1)

    def probe(_: AsyncIO, folder: Path, __: int) -> DiskSpeed:
        return DiskSpeed(read=bucket(folder).read_rate, write=bucket(folder).write_rate, direct=True)

    monkeypatch.setattr("lamina.tiers.links.known_links.identify", identity)
    monkeypatch.setattr("lamina.tiers.links.known_links.probe_disk", probe)
    monkeypatch.setattr(GenerationStore, "devices", property(lambda _: tuple(range(len(found)))))
    return found


def on_disks(
    disks: Mapping[Path, Bucket],
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    *,
    waits: bool = False,
    resume: bool | None = None,
    changes: Mapping[str, Any] | None = None,
    **tiers: Any,
) -> TrainingEngine:
    """An engine with all of its state on the disks."""

    def open_disks(**options: Any) -> DisksIO:
        return DisksIO(AsyncIO(**options), disks, waits=waits)

    monkeypatch.setattr("lamina.engine.zero_options.AsyncIO", open_disks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiers": {"nvme": [str(folder) for folder in disks]} | tiers,
    } | (changes or {})
    return initialize(model, config=config, resume=resume)[0]


def net() -> nn.Module:
    return residual_model(WIDTH)


def step(engine: TrainingEngine, number: int) -> float:
    loss = engine(batch(number, WIDTH))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def shares(engine: TrainingEngine) -> tuple[float, ...]:
    assert engine.runtime.store is not None
    return engine.runtime.store.shares

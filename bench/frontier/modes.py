"""The runs of `frontier`: lamina under several budgets, plain PyTorch, and DeepSpeed's settings, as configs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ADAM = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One run: which system, under which name, with which config."""

    system: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For tables and `--only`."""
        return f"{self.system} {self.name}"


def _common(micro_batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
    }


def lamina_modes(
    num_params: int, micro_batch: int, folder: str, budgets: Sequence[tuple[float, float]]
) -> Iterator[Mode]:
    """Everything in memory, then each budget of (device, host) bytes per parameter."""
    yield Mode(system="lamina", name="in memory", config=_common(micro_batch) | {"zero_optimization": {"stage": 3}})
    for device, host in budgets:
        tiers = {
            "device_bytes": int(device * num_params),
            "host_bytes": int(host * num_params),
            "nvme": [folder],
            "placement": "auto",
        }
        yield Mode(
            system="lamina",
            name=f"{device:g}+{host:g} B/param",
            config=_common(micro_batch) | {"zero_optimization": {"stage": 3}, "tiers": tiers},
        )


def peer_modes(micro_batch: int, folder: str) -> Iterator[Mode]:
    """Its documented settings, and those that were the fastest and the leanest of a search that worked."""
    for name in ("none", "cpu", "nvme", "streaming"):
        zero: dict[str, Any] = {
            "stage": 3,
            "overlap_comm": True,
            "sub_group_size": 20_000_000,
            "stage3_param_persistence_threshold": 10_000,
        }
        device = {"none": None, "cpu": "cpu"}.get(name, "nvme")
        if device is not None:
            zero["offload_optimizer"] = {"device": device, "pin_memory": False}
            zero["offload_param"] = {"device": device, "pin_memory": False}
        block = 8 << 20
        if device == "nvme":
            streaming = name == "streaming"
            block = 1 << 20 if streaming else block
            zero["stage3_prefetch_bucket_size"] = 0
            zero["offload_optimizer"] |= {
                "nvme_path": folder,
                "buffer_count": 4 if streaming else 8,
                "pipeline_read": False,
                "pipeline_write": False,
            }
            zero["offload_param"] |= {"nvme_path": folder, "buffer_count": 8 if streaming else 64}
            if streaming:
                zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        config = _common(micro_batch) | {
            "zero_optimization": zero,
            "steps_per_print": 10**9,
            "aio": {"block_size": block, "queue_depth": 32, "single_submit": False, "overlap_events": True},
        }
        yield Mode(system="deepspeed", name=name, config=config)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """At a share of the memory of a mode of DeepSpeed, so many times its speed."""

    peer: str
    memory: float
    speed: float

    def __str__(self) -> str:
        return f"{self.memory:g} x the memory of deepspeed {self.peer}: {self.speed:g} x its speed"

    @property
    def box(self) -> str:
        """For the picture's legend."""
        return f"wanted: {self.memory:g} x the memory of {self.peer}, {self.speed:g} x its speed"


WANTED = (
    Wanted(peer="nvme", memory=0.25, speed=2.0),
    Wanted(peer="streaming", memory=0.5, speed=2.5),
    Wanted(peer="nvme", memory=1.0, speed=3.0),
    Wanted(peer="streaming", memory=1.0, speed=3.0),
)
PASSES_LIMIT = 1.1
"""Forward and backward with nothing to fetch, over plain PyTorch's."""
START_LIMIT_S = 1.5
"""From the start of the process to the end of the first step, over plain PyTorch's, for a small model."""

"""The grid of placements and formats: every case, and a few in which every pair of choices occurs together."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

DEVICE_OF_TIER = {"device": "none", "host": "cpu", "nvme": "nvme", "divided": "nvme"}
DIVIDED = 0.6  # of the optimizer state on NVMe, the rest in device memory, as the parameters are
CLIP_NORM = 0.05  # far below the norms of the first steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """``home`` is the tier of what the stage shares out: the optimizer state from stage 1 on, at 3 the parameters too. Divided: a
    share of the state is on NVMe, everything else in device memory."""

    stage: int
    home: str
    optimizer: str
    dtype: str
    accumulation: int
    clips: bool

    @property
    def numbers(self) -> "Case":
        """The case whose numbers this one must have, bit by bit: everything in memory on every rank."""
        return Case(**asdict(self) | {"stage": 0, "home": "device"})

    def config(self, folder: str) -> dict[str, Any]:
        params = {"lr": 1e-3, "weight_decay": 0.1} | ({} if self.optimizer == "AdamW" else {"adam_w_mode": False})
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP_NORM if self.clips else 0,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": {"stage": self.stage},
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"]["loss_scale"] = 1024.0
        device, divided = DEVICE_OF_TIER[self.home], self.home == "divided"
        offloaded = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
        if self.stage >= 1:
            config["zero_optimization"]["offload_optimizer"] = offloaded | ({"ratio": DIVIDED} if divided else {})
        if self.stage == 3 and not divided:
            config["zero_optimization"]["offload_param"] = offloaded
        return config

    def __str__(self) -> str:
        clips = "clipped" if self.clips else "unclipped"
        return f"stage {self.stage}, {self.home}, {self.optimizer}, {self.dtype}, {self.accumulation} micro-batches, {clips}"


CHOICES: dict[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "home": ("device", "host", "nvme", "divided"),
    "optimizer": ("Adam", "AdamW"),
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "clips": (False, True),
}


def all_cases() -> list[Case]:
    """What can be asked for: stage 0 keeps everything in device memory."""
    every = [Case(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]
    return [case for case in every if case.stage > 0 or case.home == "device"]


def covering_cases() -> list[Case]:
    """Greedily: the case with the most pairs of choices that none before it has, until every pair has occurred."""
    everything = all_cases()
    left = {pair for case in everything for pair in pairs(case)}
    chosen = []
    while left:
        best = max(everything, key=lambda case: len(left & set(pairs(case))))
        left -= set(pairs(best))
        chosen.append(best)
    return chosen


def pairs(case: Case) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(asdict(case).items(), 2)

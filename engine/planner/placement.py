"""Where each kind of state lives: a point in the placement space."""

from collections.abc import Iterator
from dataclasses import dataclass

from lamina.engine.planner.errors import PlanError

DEVICE, HOST, NVME = "device", "host", "nvme"
TIERS = (DEVICE, HOST, NVME)
_SPEED = {DEVICE: 0, HOST: 1, NVME: 2}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """ZeRO stage, the home tier of each kind of state, and how ranks are split."""

    stage: int
    param: str = DEVICE
    optimizer: str = DEVICE
    """Masters or remainders, and moments."""
    grad: str = ""
    """Held gradients; empty means beside the update: device for an optimizer on the device, else host.

    Where the device tier is host memory they are in the host tier in any case.
    """
    activations: str = DEVICE
    """Activation checkpoints."""
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise PlanError(f"stage: {self.stage} is unknown; write 0, 1, 2 or 3")
        if not self.grad:
            object.__setattr__(self, "grad", DEVICE if self.optimizer == DEVICE else HOST)
        for name in ("param", "optimizer", "grad", "activations"):
            if getattr(self, name) not in TIERS:
                raise PlanError(f"placement: {name} is {getattr(self, name)!r}; write device, host or nvme")
        if self.stage < 3 and self.param != DEVICE:
            raise PlanError(f"placement: parameters on {self.param} need stage 3, not {self.stage}")
        if self.stage == 0 and self.optimizer != DEVICE:
            raise PlanError(f"placement: optimizer state on {self.optimizer} needs stage 1, 2 or 3, not 0")
        if _SPEED[self.optimizer] < _SPEED[self.param]:
            raise PlanError(
                f"placement: optimizer state on {self.optimizer} with parameters on {self.param}: put the "
                f"optimizer state on {self.param} or below, it is used less often"
            )
        if self.grad == DEVICE != self.optimizer or (self.grad == NVME and self.optimizer == DEVICE):
            raise PlanError(
                f"placement: gradients on {self.grad}, optimizer state on {self.optimizer}: put both on the "
                "device or both off it, the update runs in one place"
            )
        for name in ("tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise PlanError(f"placement: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def model_parallel(self) -> int:
        """Ranks that share one replica."""
        return self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """Short name: ``ZeRO-3 param host, optimizer nvme``."""
        parts = [f"ZeRO-{self.stage}" if self.stage else "no ZeRO"]
        where = []
        if self.stage == 3 and self.param != DEVICE:
            where.append(f"param {self.param}")
        if self.optimizer != DEVICE:
            where.append(f"optimizer {self.optimizer}")
        if self.grad == NVME:
            where.append("grad nvme")
        if self.activations != DEVICE:
            where.append(f"checkpoints {self.activations}")
        if self.tensor > 1:
            where.append(f"tensor {self.tensor}")
        if self.pipeline > 1:
            where.append(f"pipeline {self.pipeline}")
        return " ".join([*parts, ", ".join(where)]) if where else parts[0]


def data_parallel_ranks(world: int, place: Placement) -> int:
    """Ranks over which ZeRO splits the state. Raises PlanError when the world does not divide."""
    if world % place.model_parallel:
        raise PlanError(
            f"placement: {world} ranks are no multiple of tensor {place.tensor} x pipeline {place.pipeline}"
        )
    return world // place.model_parallel


def all_placements(
    *,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    tensor: int = 1,
    pipeline: int = 1,
    nvme: bool = True,
    activations: str = DEVICE,
) -> Iterator[Placement]:
    """Every stage with every sensible home of parameters and optimizer state, fastest tiers first.

    With the optimizer on nvme both homes of the gradients are given: host, and nvme for hosts too small for
    them.
    """
    for stage in stages:
        for param in TIERS if stage == 3 else (DEVICE,):
            for optimizer in TIERS:
                if _SPEED[optimizer] < _SPEED[param] or (stage == 0 and optimizer != DEVICE):
                    continue
                if NVME in (param, optimizer) and not nvme:
                    continue
                for grad in (HOST, NVME) if optimizer == NVME else ("",):
                    yield Placement(
                        stage=stage,
                        param=param,
                        optimizer=optimizer,
                        grad=grad,
                        tensor=tensor,
                        pipeline=pipeline,
                        activations=activations,
                    )

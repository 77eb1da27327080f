"""Mixed-precision training of several ranks in plain PyTorch and one process: no shard, no tier, no group.

Masters are fp32 and run through torch.optim's fused kernels; the model computes in its own dtype. Ranks are summed in order.
"""

import math
from collections.abc import Callable

import torch
from grid_cases import CLIP_NORM, Case
from torch import nn

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 1024.0


def train(case: Case, build: Callable[[], nn.Module], inputs: Callable[[int], tuple], world_size: int, steps: int):
    """The final masters by name. ``inputs(index)`` is what the engine's rank ``index % world_size`` gets."""
    module = build()
    masters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module.to(DTYPE[case.dtype])
    _copy_rounded(module, masters)
    kind = torch.optim.AdamW if case.optimizer == "AdamW" else torch.optim.Adam
    optimizer = kind(masters.values(), lr=1e-3, weight_decay=0.1, fused=True)
    scale = LOSS_SCALE if case.dtype == "fp16" else 1.0
    for step in range(steps):
        window: dict[str, torch.Tensor] = {}
        for micro in range(case.accumulation):
            first = (step * case.accumulation + micro) * world_size
            for name, gradient in _mean_over_ranks(module, case, inputs, first, world_size, scale).items():
                if case.accumulation > 1:
                    gradient = gradient.float()
                window[name] = window[name] + gradient if name in window else gradient
        _update(case, masters, window, optimizer, scale)
        _copy_rounded(module, masters)
    return masters


@torch.no_grad()
def _copy_rounded(module: nn.Module, masters: dict[str, torch.Tensor]) -> None:
    """Masters to the compute dtype; to bf16 a half-way case goes to the larger magnitude, as 16 bits of remainder want it."""
    for name, parameter in module.named_parameters():
        values = masters[name]
        if parameter.dtype == torch.bfloat16:
            values = ((values.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
        parameter.copy_(values)


def _mean_over_ranks(
    module: nn.Module, case: Case, inputs: Callable[[int], tuple], first: int, world_size: int, scale: float
) -> dict[str, torch.Tensor]:
    """Each rank's gradients in the compute dtype, summed in rank order in fp32."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        loss = module(*inputs(first + rank))
        loss = loss / case.accumulation if case.accumulation > 1 else loss
        (loss * scale).backward()
        for name, parameter in module.named_parameters():
            gradient = parameter.grad.float()
            total[name] = total[name] + gradient if name in total else gradient
            parameter.grad = None
    dtype = DTYPE[case.dtype]
    return {name: gradient.to(dtype) / world_size for name, gradient in total.items()}


def _update(case: Case, masters, window, optimizer: torch.optim.Optimizer, scale: float) -> None:
    norm = math.sqrt(math.fsum(gradient.double().square().sum().item() for gradient in window.values())) / scale
    factor = min(1.0, CLIP_NORM / (norm + 1e-6)) if case.clips else 1.0
    for name, master in masters.items():
        master.grad = window[name].float() * torch.tensor(factor / scale, dtype=torch.float32)
    optimizer.step()

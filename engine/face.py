"""What scripts ask an engine besides training: the module's own methods, and the config's figures under DeepSpeed's names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .config import EngineConfig


class EngineFace:
    """Base of the engine. An attribute that it lacks is looked up on the module."""

    module: nn.Module
    config: EngineConfig

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its {type(module).__name__} has an attribute {name!r}"
            ) from None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in tuples, lists and dicts, cast; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floating(inner, dtype) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(cast_floating(inner, dtype) for inner in value)
    return value


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a module returned. Raises TypeError when there is none."""
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"train_batch found no loss in {type(output).__name__}: return the loss, or a tuple that starts with it"
        )
    return loss

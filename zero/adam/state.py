"""The state of one of CPUAdam's parameters: what it consists of, and how it lies in memory beside the parameter."""

from typing import Any

import torch

from lamina.zero.adam.dtypes import KERNEL_DTYPE

MASTER_KEY = {torch.bfloat16: "remainder", torch.float16: "master"}
STATE_DTYPES = {
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "remainder": torch.int16,
    "master": torch.float32,
}


def where_is(group: int, index: int, param: torch.Tensor) -> str:
    """How errors call a parameter."""
    return f"parameter {index} of group {group}, shape {tuple(param.shape)}"


def check_param(group: int, index: int, param: torch.Tensor) -> None:
    """Raises ValueError or TypeError for a parameter that the kernels cannot update."""
    where = where_is(group, index, param)
    if param.layout is not torch.strided:
        raise ValueError(f"{where}: layout {param.layout}; CPUAdam takes dense parameters")
    if param.dtype not in KERNEL_DTYPE:
        raise TypeError(
            f"{where}: dtype {param.dtype}; CPUAdam takes float32, bfloat16 and float16 "
            f"(split a complex parameter with torch.view_as_real)"
        )
    if param.device.type != "cpu":
        raise ValueError(f"{where}: on {param.device}; CPUAdam takes CPU parameters")


def check_grad(group: int, index: int, param: torch.Tensor, grad: torch.Tensor) -> None:
    """Raises RuntimeError or TypeError for a gradient that the kernels cannot read."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{where_is(group, index, param)}: its gradient is {grad.layout}; CPUAdam takes dense "
            f"gradients (make the embedding with sparse=False, or use torch.optim.SparseAdam for it)"
        )
    if grad.dtype not in KERNEL_DTYPE or not grad.is_cpu or param.dtype not in KERNEL_DTYPE or not param.is_cpu:
        raise TypeError(
            f"{where_is(group, index, param)}: {param.dtype} on {param.device} with a gradient {grad.dtype} on "
            f"{grad.device}; CPUAdam takes float32, bfloat16 and float16 on the CPU"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"{where_is(group, index, param)}: its gradient has shape {tuple(grad.shape)}; was the parameter's data "
            f"exchanged after the backward pass? Compute the gradient again"
        )


def start_state(param: torch.Tensor, state: dict[str, Any]) -> None:
    """Adds what is missing: no steps done, moments of 0, the master as the parameter is."""
    counter = state.get("step", 0.0)
    if not (isinstance(counter, torch.Tensor) and counter.dtype is torch.float32 and counter.is_cpu):
        state["step"] = torch.tensor(float(counter), dtype=torch.float32)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    if param.dtype is torch.bfloat16 and "remainder" not in state:
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
    elif param.dtype is torch.float16 and "master" not in state:
        state["master"] = param.detach().float()


def lay_out_state(param: torch.Tensor, state: dict[str, Any], master_key: str | None) -> None:
    """Sees to it that the state's elements lie in memory in the order of param's (param.data may have been changed)."""
    for key in ("exp_avg", "exp_avg_sq", master_key):
        if key is None:
            continue
        if state[key].shape != param.shape or state[key].dtype is not STATE_DTYPES[key]:
            raise RuntimeError(
                f"the state's {key} is {state[key].dtype} of shape {tuple(state[key].shape)} for a parameter of shape "
                f"{tuple(param.shape)}; {STATE_DTYPES[key]} of that shape is wanted"
            )
        if state[key].stride() != param.stride() and not (param.is_contiguous() and state[key].is_contiguous()):
            state[key] = laid_out_like(param, state[key])


def laid_out_like(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of tensor whose elements lie in the order of param's."""
    return torch.empty_like(param, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)


def dense_pair(param: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """param and grad, or copies of them, so that both are dense in memory in the same order of elements."""
    if param.is_contiguous():
        return param, grad if grad.is_contiguous() and not grad.is_neg() else grad.resolve_neg().contiguous()
    dense = torch.empty_like(param, memory_format=torch.preserve_format)
    target = param if dense.stride() == param.stride() else dense.copy_(param)
    if grad.is_neg() or grad.stride() != target.stride():
        grad = laid_out_like(target, grad)
    return target, grad

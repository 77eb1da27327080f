"""Rates of this machine's compute and memory, measured in a few seconds: enough for a plan."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import distributed as dist

from lamina.bench.training.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine.planner import Workload, shape_from_module
from lamina.engine.planner.flops import step_flops
from lamina.engine.planner.state_bytes import as_dtype
from lamina.zero.ranks.fixed_order import FixedOrder
from lamina.zero.ranks.lanes import Lane
from lamina.zero.ranks.notices import Board

_MATRIX = 1024
_ADAM_FLOATS = 1 << 23
_EXCHANGED = 16 << 20
_REPEATS = 5
_KERNEL_SHARE = 0.7
"""Share of a bare matrix product's rate that a whole forward and backward pass reaches."""
_ADAM_BYTES = 28
"""fp32 AdamW reads parameter, gradient and two moments and writes all but the gradient."""


def quick_rates() -> dict[str, float]:
    """Fields of the planner's machine: operations per second of matrix products, bytes per second of an
    update."""
    parameter = torch.nn.Parameter(torch.ones(_ADAM_FLOATS))
    parameter.grad = torch.full_like(parameter, 1e-3)
    update = torch.optim.AdamW([parameter], fused=True)
    return {
        "fp32_flops": _product_flops(torch.float32),
        "half_flops": _product_flops(torch.bfloat16),
        "host_bandwidth": _ADAM_BYTES * _ADAM_FLOATS / _median_seconds(update.step),
        "achievable": _KERNEL_SHARE,
    }


def training_flops(dtype: str, shape: GPTShape, *, micro_batch: int = 2) -> float:
    """Operations per second of a forward and backward pass in memory: two blocks of this shape, so many
    sequences."""
    small = GPTShape(layers=2, dim=shape.dim, heads=shape.heads, seq=shape.seq, tied=shape.tied)
    model = GPT(small).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    tokens = torch.randint(VOCABULARY, (micro_batch, shape.seq))

    def work() -> None:
        model(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    load = Workload(micro_batch=micro_batch, sequence=shape.seq, dtype=as_dtype(dtype), checkpoint_interval=0)
    flops = step_flops(shape_from_module(model, name="gpt", heads=small.heads), load).hardware_per_token
    return flops * load.tokens / _median_seconds(work)


def exchange_rate(dtype: torch.dtype, nbytes: int = _EXCHANGED) -> float:
    """Bytes per second that a rank of the default process group receives in gathers of parameters and sums of gradients, with
    the adding up. Collective, of CPU memory."""
    ranks = dist.get_world_size()
    flat = torch.ones(nbytes // dtype.itemsize // ranks * ranks, dtype=dtype)
    part = flat[: flat.numel() // ranks].clone()
    board = Board(rank=dist.get_rank(), world_size=ranks, store=None, started=[0])
    lane = Lane(group=None, board=board, number=0)
    sums = FixedOrder(rank=dist.get_rank(), world_size=ranks, exchanges=lane, gathers=lane)

    def work() -> None:
        dist.all_gather_into_tensor(flat, part)
        sums.start_reduce_scatter(flat, part, "measuring").wait()

    return 2 * flat.nbytes * (ranks - 1) / ranks / _median_seconds(work)


def _product_flops(dtype: torch.dtype) -> float:
    left = torch.ones(_MATRIX, _MATRIX, dtype=dtype)
    out = torch.empty_like(left)
    return 2 * _MATRIX**3 / _median_seconds(lambda: torch.matmul(left, left, out=out))


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)

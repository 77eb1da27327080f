"""What the rest of the path can do: copies and the Adam kernel in memory, and transfers to and from a GPU."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lamina.aio_native import AlignedBuffer
from lamina.zero import AdamHyper, AdamPlanes, DType, Kernels

ARRAY_BYTES = 128 << 20
"""Far more than the caches hold, for each of the arrays."""
ROUNDS_AT_LEAST = 3
DEVICE_BYTES = 256 << 20


def memory_rates(seconds: float, *, array_bytes: int = ARRAY_BYTES) -> dict[str, float]:
    """Bytes per second of copy, triad, the Adam-shaped stream and Adam itself; `adam_elements` per second.

    All run on the kernels' own threads. Rounds of all of them are interleaved, because memory bandwidth of a shared
    machine drifts. Raises MemoryError or OSError when the arrays cannot be had.
    """
    numel = array_bytes // 4
    with contextlib.ExitStack() as stack:
        kernels = stack.enter_context(Kernels(num_threads=len(os.sched_getaffinity(0))))
        arrays = [_touched(stack.enter_context(AlignedBuffer(array_bytes))) for _ in range(4)]
        param, grad, first, second = arrays
        hyper = AdamHyper(lr=1e-3, step=1)
        planes = AdamPlanes(
            n=numel,
            param=param,
            param_dtype=DType.FP32,
            grad=grad,
            grad_dtype=DType.FP32,
            exp_avg=first,
            exp_avg_sq=second,
        )

        def adam() -> None:
            kernels.adam(planes, hyper)

        def accumulate(add: bool) -> None:
            kernels.accumulate(numel, dst=param, src=grad, src_dtype=DType.FP32, scale=0.5, add=add)

        # (what runs, arrays that it reads and writes in all)
        jobs: dict[str, tuple[Callable[[], None], int]] = {
            "copy": (lambda: accumulate(False), 2),
            "triad": (lambda: accumulate(True), 3),
            "stream": (lambda: kernels.stream(numel, source=arrays[:3], target=arrays[:3]), 6),
            "adam": (adam, 7),
        }
        taken = _interleaved({name: job for name, (job, _) in jobs.items()}, seconds)
    rates = {name: jobs[name][1] * array_bytes / taken[name] for name in jobs}
    return rates | {"adam_elements": numel / taken["adam"]}


def _touched(buffer: AlignedBuffer) -> int:
    """The address, after every page was written: pages that are only read are all the same page of zeros."""
    np.frombuffer(buffer.view, dtype=np.float32).fill(0.5)
    return buffer.address


def _interleaved(jobs: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median seconds of each job over rounds of all; a first round warms up and is not counted."""
    for job in jobs.values():
        job()
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    end = time.perf_counter() + seconds
    while min(map(len, taken.values())) < ROUNDS_AT_LEAST or time.perf_counter() < end:
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def gpu_missing() -> str:
    """Why there is no GPU to measure; empty when there is one."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return ""


def device_rates(seconds: float, *, nbytes: int = DEVICE_BYTES) -> dict[str, float]:
    """Bytes per second between page-locked host memory and the current GPU: each way, and both at once (their sum)."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def to_device() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def finished(*works: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for work in works:
                work()
            torch.cuda.synchronize()

        return run

    jobs = {
        "host_to_device": finished(to_device),
        "device_to_host": finished(to_host),
        "both_ways": finished(to_device, to_host),
    }
    taken = _interleaved(jobs, seconds)
    return {name: (2 if name == "both_ways" else 1) * nbytes / value for name, value in taken.items()}

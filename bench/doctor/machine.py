"""Checks of memory, processor and the Adam kernels, which are really run on each path and compared with plain arithmetic."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lamina.bench.doctor.finding import Finding, State
from lamina.bench.report import format_bytes, machine_facts
from lamina.tiers.memory.limits import read_memory_limits

if TYPE_CHECKING:
    from lamina.zero.adam.kernels import Kernels

LITTLE_MEMORY = 2 << 30
SAMPLES = 1003
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "asimd", "bf16")
QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")


def check_system() -> Iterator[Finding]:
    """Kernel and interpreter."""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    supported = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    yield Finding(
        section="system",
        name="kernel",
        state=State.OK if supported else State.WARN,
        text=kernel if supported else f"{kernel}: lamina is made for Linux on x86-64 and aarch64",
    )
    old = sys.version_info < (3, 11)
    text = f"{platform.python_version()} at {sys.executable}"
    yield Finding(section="system", name="python", state=State.FAIL if old else State.OK, text=text)


def check_memory() -> Iterator[Finding]:
    """What may still be taken, and what limits it."""
    limits = read_memory_limits()
    allowed, why = limits.allowance()
    little = allowed < LITTLE_MEMORY
    group = "no cgroup limit"
    if limits.cgroup is not None:
        group = f"cgroup {limits.cgroup.path}: {format_bytes(limits.cgroup.limit)}"
    yield Finding(
        section="machine",
        name="memory",
        state=State.WARN if little else State.OK,
        text=f"{format_bytes(allowed)} of {format_bytes(limits.total)} may be taken ({why}); {group}",
        mend="docker run --memory=…, or end other processes (ps --sort=-rss aux | head)" if little else "",
    )
    locked, reason = limits.allowance(locked=True)
    short = locked < allowed
    yield Finding(
        section="machine",
        name="pinned memory",
        state=State.INFO if short else State.OK,
        text=f"{format_bytes(locked)} may be page-locked" + (f" ({reason})" if short else ""),
        mend="ulimit -l unlimited" if short else "",
    )


def check_processor() -> Iterator[Finding]:
    """Cores that this process may use, quota, and instructions that the kernels know."""
    cores, online = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota()
    usable = cores if quota is None else min(float(cores), quota)
    tight = quota is not None and quota < cores
    limited = f", but a quota of {quota:g}" if tight else ""
    yield Finding(
        section="machine",
        name="processor",
        state=State.WARN if tight or usable < 2 else State.OK,
        text=f"{machine_facts()['cpu']}: {cores} of {online} cores{limited}; {' '.join(cpu_flags()) or 'no vector flags known'}",
        mend="docker run --cpus=…, or taskset -p" if tight or usable < 2 else "",
    )


def cpu_quota(file: Path = QUOTA_V2) -> float | None:
    """Cores that the control group grants, None without a limit or where it cannot be read."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def cpu_flags() -> list[str]:
    """Those of FLAGS that the processor has."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            have = set(value.split())
            return [flag for flag in FLAGS if flag in have]
    return []


def check_kernels() -> Iterator[Finding]:
    """Every path that this processor can run, by an Adam step that is compared with plain arithmetic."""
    # Here: lamina.zero imports torch, and without it this check alone shall fail.
    from lamina.zero.adam.kernels import Kernels, available_paths

    paths = available_paths()
    wrong = []
    for path in paths:
        with Kernels(num_threads=2, path=path) as kernels:
            error = adam_error(kernels)
        if not error < 1e-5:
            wrong.append(f"{path} (off by {error:.1g})")
    if wrong:
        text = f"Adam is WRONG on {', '.join(wrong)}"
        mend = "pip install --force-reinstall --no-binary lamina lamina"
        yield Finding(section="machine", name="Adam kernels", state=State.FAIL, text=text, mend=mend)
        return
    others = f"; right on {', '.join(paths[1:])} too" if paths[1:] else ""
    yield Finding(section="machine", name="Adam kernels", state=State.OK, text=f"{paths[0]} runs and is right{others}")


def adam_error(kernels: "Kernels") -> float:
    """Largest relative error of one AdamW step against the formula in double precision."""
    from lamina.zero.adam.kernels import AdamHyper, AdamPlanes, DType

    source = np.random.default_rng(1)
    param, grad, first = (source.standard_normal(SAMPLES).astype(np.float32) for _ in range(3))
    second = np.abs(source.standard_normal(SAMPLES)).astype(np.float32)
    hyper = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)
    want_first = hyper.beta1 * first.astype(np.float64) + (1 - hyper.beta1) * grad
    want_second = hyper.beta2 * second.astype(np.float64) + (1 - hyper.beta2) * grad.astype(np.float64) ** 2
    scale = np.sqrt(want_second / (1 - hyper.beta2**hyper.step)) + hyper.eps
    step = hyper.lr * want_first / (1 - hyper.beta1**hyper.step) / scale
    want = param.astype(np.float64) * (1 - hyper.lr * hyper.weight_decay) - step
    planes = AdamPlanes(
        n=SAMPLES,
        param=param.ctypes.data,
        param_dtype=DType.FP32,
        grad=grad.ctypes.data,
        grad_dtype=DType.FP32,
        exp_avg=first.ctypes.data,
        exp_avg_sq=second.ctypes.data,
    )
    kernels.adam(planes, hyper)
    pairs = ((param, want), (first, want_first), (second, want_second))
    return max(float(np.max(np.abs(got - right) / (np.abs(right) + 1e-3))) for got, right in pairs)

"""Which slice of the state belongs to whom, and what happens to it: groups, mixed precision, Adam, hooks."""

from .access import GatheredParameters, get_full, get_local, set_full, set_local
from .cpu_adam import CPUAdam
from .kernels import AdamHyper, DType, Kernels
from .optimizer import AdamDefaults, TieredAdam
from .runtime import ZeroOptions, ZeroRuntime

__all__ = [
    "AdamDefaults",
    "AdamHyper",
    "CPUAdam",
    "DType",
    "GatheredParameters",
    "Kernels",
    "TieredAdam",
    "ZeroOptions",
    "ZeroRuntime",
    "get_full",
    "get_local",
    "set_full",
    "set_local",
]

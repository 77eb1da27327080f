"""Which slice of the state belongs to whom, and what happens to it: groups, mixed precision, Adam, hooks."""

from .access import GatheredParameters, get_full, get_local, set_full, set_local
from .client_optimizer import ClientOptimizer
from .collectives import DivergenceError, Ranks
from .cpu_adam import CPUAdam
from .init import Init
from .kernels import AdamHyper, AdamPlanes, DType, Kernels
from .optimizer import AdamDefaults, TieredAdam
from .options import ZeroOptions
from .runtime import ZeroRuntime
from .tiled_linear import TiledLinear, tile_linears

__all__ = [
    "AdamDefaults",
    "AdamHyper",
    "AdamPlanes",
    "CPUAdam",
    "ClientOptimizer",
    "DType",
    "DivergenceError",
    "GatheredParameters",
    "Init",
    "Kernels",
    "Ranks",
    "TieredAdam",
    "TiledLinear",
    "ZeroOptions",
    "ZeroRuntime",
    "get_full",
    "get_local",
    "set_full",
    "set_local",
    "tile_linears",
]

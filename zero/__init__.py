"""Which slice of the state belongs to whom, and what happens to it: groups, mixed precision, Adam, hooks."""

from .access import GatheredParameters, get_full, get_local, set_full, set_local
from .adam.cpu_adam import CPUAdam
from .adam.kernels import AdamHyper, AdamPlanes, DType, Kernels
from .init import Init
from .options import ZeroOptions
from .ranks.collectives import DivergenceError, Ranks
from .runtime import ZeroRuntime
from .step.client_optimizer import ClientOptimizer
from .step.optimizer import AdamDefaults, TieredAdam
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

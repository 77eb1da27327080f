"""The engine's configuration: DeepSpeed's JSON dialect plus the block `tiers`."""

from lamina.engine.config.batch import BatchSizes
from lamina.engine.config.engine_config import EngineConfig
from lamina.engine.config.errors import ConfigError, Problem
from lamina.engine.config.key import Key, Status
from lamina.engine.config.optimizer import AdamConfig, AdamParams, OptimizerConfig, TorchOptimizerConfig
from lamina.engine.config.scheduler import SchedulerConfig
from lamina.engine.config.table import known_keys
from lamina.engine.config.tiers import PLANES, NvmePathConfig, TiersConfig
from lamina.engine.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

KEYS = known_keys(EngineConfig)
"""Every known key by its dotted path: implemented, hint, refused or renamed, with the reason."""

__all__ = [
    "KEYS",
    "PLANES",
    "AdamConfig",
    "AdamParams",
    "BatchSizes",
    "ConfigError",
    "EngineConfig",
    "Key",
    "NvmePathConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "Problem",
    "SchedulerConfig",
    "Status",
    "TiersConfig",
    "TorchOptimizerConfig",
    "ZeroConfig",
]

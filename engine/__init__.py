"""What users import: initialize(), the config, training, checkpoints, metrics, the planner.

Names are loaded when first used, so that the planner and the config can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .building import initialize
    from .checkpoint.loading import LoadReport
    from .config import ConfigError, EngineConfig
    from .loss_scale import LossScaleError
    from .metrics import StepMetrics
    from .training import TrainingEngine

__all__ = [
    "ConfigError",
    "EngineConfig",
    "LoadReport",
    "LossScaleError",
    "StepMetrics",
    "TrainingEngine",
    "initialize",
]

_HOMES = {
    "ConfigError": ".config",
    "EngineConfig": ".config",
    "LoadReport": ".checkpoint.loading",
    "LossScaleError": ".loss_scale",
    "StepMetrics": ".metrics",
    "TrainingEngine": ".training",
    "initialize": ".building",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home, __name__)
    except AttributeError as error:  # an older build of the C code, say: "no attribute" would be taken for a wrong name
        raise ImportError(f"{__name__}{home} cannot be loaded: {error}") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Which optimizer trains which parameters: the config's or the caller's, lamina's Adam or one of torch's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina.zero import AdamDefaults

from .config import ConfigError, EngineConfig
from .config.optimizer import AdamConfig, TorchOptimizerConfig

# Classes of torch.optim that look at other things than one gradient a step, element by element.
_WHOLE_TENSORS = ("LBFGS", "SparseAdam", "Muon")


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """``params``: param groups for lamina's Adam with ``adam`` as defaults; None: forward only. ``client``: an optimizer
    of torch over the module's parameters, which runs itself; its state stays in memory."""

    params: list[Any] | None = None
    adam: AdamDefaults = field(default_factory=AdamDefaults)
    client: torch.optim.Optimizer | None = None


def choose_optimizer(
    settings: EngineConfig,
    given: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None,
    model_parameters: Any,
    model: nn.Module,
) -> OptimizerChoice:
    """Raises ConfigError, TypeError or ValueError where there is none, or two, or one that cannot be taken."""
    configured = settings.optimizer
    if given is not None and configured is not None:
        message = "is given in the config and as initialize(optimizer=...): keep one of the two"
        raise ConfigError([("optimizer", message)])
    if given is not None:
        if not isinstance(given, torch.optim.Optimizer):
            if not callable(given):
                raise TypeError(f"optimizer is {type(given).__name__}: want a torch.optim.Optimizer or a callable")
            given = given(_groups(model_parameters, model))
            if not isinstance(given, torch.optim.Optimizer):
                raise TypeError(f"optimizer(params) gave {type(given).__name__}: want a torch.optim.Optimizer")
        return _taken_over(settings, given)
    if configured is None:
        return OptimizerChoice()
    params = _groups(model_parameters, model)
    if isinstance(configured, TorchOptimizerConfig):
        try:
            client = getattr(torch.optim, configured.type)(params, **configured.params)
        except (TypeError, ValueError) as error:
            raise ConfigError([("optimizer.params", f"torch.optim.{configured.type} refuses them: {error}")]) from error
        return OptimizerChoice(params=client.param_groups, client=client)
    return OptimizerChoice(params=params, adam=_adam_defaults(configured))


def _adam_defaults(configured: AdamConfig) -> AdamDefaults:
    given = configured.params
    return AdamDefaults(
        lr=given.lr,
        betas=(given.betas[0], given.betas[1]),
        eps=given.eps,
        weight_decay=given.weight_decay,
        adamw_mode=configured.adamw_mode,
        bias_correction=given.bias_correction,
        maximize=given.maximize,
    )


def _groups(model_parameters: Any, model: nn.Module) -> list[Any]:
    params = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if params and isinstance(params[0], tuple):  # named_parameters()
        params = [parameter for _, parameter in params]
    if params and not isinstance(params[0], dict):
        params = [parameter for parameter in params if parameter.requires_grad]
    if not params:
        raise ValueError("no parameter requires a gradient: unfreeze some, or give no optimizer for forward-only use")
    return params


def _taken_over(settings: EngineConfig, optimizer: torch.optim.Optimizer) -> OptimizerChoice:
    name = type(optimizer).__name__
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return _adam_taken_over(optimizer)
    if name in _WHOLE_TENSORS:
        raise TypeError(f"optimizer is {name}, which needs more than one gradient a step, or looks at whole matrices")
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    if not of_torch and not settings.zero_allow_untested_optimizer:
        raise ConfigError(
            [
                (
                    "zero_allow_untested_optimizer",
                    f"is false, and optimizer is {name} of {type(optimizer).__module__}, not a class of torch.optim: write true "
                    f"if it updates each parameter from its own gradient",
                )
            ]
        )
    return OptimizerChoice(params=optimizer.param_groups, client=optimizer)


def _adam_taken_over(optimizer: torch.optim.Optimizer) -> OptimizerChoice:
    """The very group objects are shared, so that a schedule made on the caller's optimizer changes the rates in use."""
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError("optimizer: amsgrad=True is not offered: use amsgrad=False")
    if optimizer.state:
        raise ValueError("optimizer has already taken steps: pass a fresh one and load its state afterwards")
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(
        optimizer.defaults.get("decoupled_weight_decay", False)
    )
    rate = optimizer.defaults.get("lr", 1e-3)
    return OptimizerChoice(params=optimizer.param_groups, adam=AdamDefaults(adamw_mode=decoupled, lr=float(rate)))

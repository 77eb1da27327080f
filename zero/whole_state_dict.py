"""Keeps placeholders out of ``module.state_dict()``: what is not whole in memory is gathered, or the call raises.

The hook looks only at who owns a parameter at the time of the call, so it stays right, and on the module, when an engine
was closed: then it refuses, as the values are gone.
"""

from typing import Any

import torch
from torch import nn

from .access import gathered_now, get_full, place_of
from .homes.away import is_away

PLANE = "param"


def guard_state_dict(module: nn.Module) -> None:
    """Let the state dicts of a module and of its parts hold whole parameters. Collective with several ranks."""
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.register_state_dict_post_hook(_fill)  # type: ignore[no-untyped-call]


def _fill(part: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        key = prefix + name
        if key not in state or gathered_now(parameter):
            continue
        place = place_of(parameter)
        if place is None:
            if is_placeholder(parameter):
                raise RuntimeError(
                    f"state_dict: {key} is not in memory, and the engine that had it was closed. Take the state dict before "
                    f"close(), or write engine.save_pretrained(dir)"
                )
        elif not place.segment.in_place:
            state[key] = get_full(parameter, PLANE)


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether a parameter is the NaN that stands for one whose values are elsewhere."""
    if parameter.numel() == 0 or not parameter.is_floating_point() or parameter.is_meta:
        return False
    if is_away(parameter):
        return False  # built under Init: initialize() finds the values
    stored = parameter.untyped_storage().nbytes()
    one = stored < parameter.numel() * parameter.itemsize or (parameter.numel() == 1 and stored == parameter.itemsize)
    return one and bool(torch.isnan(parameter.detach().flatten()[0]))

"""What initialize() asks of a module's parameters before it touches them: values, and no other engine that has them."""

from collections.abc import Sequence

from torch import nn

from lamina.zero.access import place_of
from lamina.zero.whole_state_dict import is_placeholder


def require_usable(model: nn.Module) -> None:
    """Raises ValueError, naming them, for parameters that an open engine has, that a closed one took along, or that were
    built on the meta device (buffers too)."""
    named = list(model.named_parameters())
    if owned := [name for name, parameter in named if place_of(parameter) is not None]:
        raise ValueError(
            f"{_listed(owned)}: owned by an engine that is still open. Call close() on that engine first, after saving what is "
            f"to be kept, and build the model anew"
        )
    if gone := [name for name, parameter in named if is_placeholder(parameter)]:
        raise ValueError(f"{_listed(gone)}: placeholders of an engine that was closed. Build the model anew")
    without = [name for name, tensor in (*named, *model.named_buffers()) if tensor.is_meta]
    if without:
        raise ValueError(
            f"{_listed(without)}: on the meta device, so without values. Give them some: inside `with lamina.zero.Init(...) as "
            f"init:` call init.materialize(model), or call model.to_empty(device='cpu') and load weights"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

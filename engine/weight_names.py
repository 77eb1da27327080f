"""The names under which a module's whole weights are written: tied ones once, the others as notes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .checkpoint.saving import persistent_buffers


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter or persistent buffer; ``aliases`` are its other names."""

    name: str
    tensor: torch.Tensor
    aliases: tuple[str, ...] = ()


def weights_of(module: nn.Module) -> list[Weight]:
    """In module order. Of a tied weight's names the first is kept that the module does not call tied itself."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _all_names(module):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    tied = _said_to_be_tied(module)
    found = []
    for key, listed in names.items():
        kept = next((name for name in listed if name not in tied), listed[0])
        aliases = tuple(name for name in listed if name != kept)
        found.append(Weight(name=kept, tensor=tensors[key], aliases=aliases))
    return found


def _all_names(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from persistent_buffers(module).items()


def _said_to_be_tied(module: nn.Module) -> set[str]:
    """Names that transformers drops when it saves."""
    said = getattr(module, "_tied_weights_keys", None) or ()
    return set(said.keys() if isinstance(said, Mapping) else said)

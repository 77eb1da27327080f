"""Which param groups the modules of a model use, one after the other and at the same time."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from .grouping import GroupSpec


def used_together(module: nn.Module, specs: Sequence[GroupSpec]) -> tuple[tuple[int, ...], ...]:
    """For every module, the groups that its forward pins, with those of the modules around it, where these are several."""
    return tuple(dict.fromkeys(used for used, own in _uses(module, specs) if own and len(used) > 1))


def used_in_order(module: nn.Module, specs: Sequence[GroupSpec]) -> tuple[int, ...]:
    """The groups as a forward pass uses them, if modules run in the order in which they were given to the model; neighbours that
    are the same once."""
    return tuple(group for group, _ in groupby(group for _, own in _uses(module, specs) for group in own))


def _uses(module: nn.Module, specs: Sequence[GroupSpec]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of every module, in order: the groups of its own parameters and of those around it; and those of its own alone."""
    group_of = {id(parameter): index for index, spec in enumerate(specs) for _, parameter in spec.parameters}
    stack: list[tuple[nn.Module, tuple[int, ...]]] = [(module, ())]
    while stack:
        part, around = stack.pop()
        own = {group_of[id(parameter)] for parameter in part.parameters(recurse=False)}
        used = tuple(sorted({*around, *own}))
        yield used, tuple(sorted(own))
        stack += reversed([(child, used) for child in part.children()])

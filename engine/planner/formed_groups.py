"""The very groups that the engine forms of a module, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FormedGroups:
    """Elements of each group and what is used with what. The root group is the first (of 0 elements where there is none), then
    come large modules outside the blocks, then the blocks."""

    numels: tuple[int, ...]
    trainable: tuple[int, ...]
    """Trainable elements of each group."""
    num_outside: int
    """Groups that are no blocks."""
    order: tuple[int, ...]
    """Groups as a forward pass uses them."""
    together: tuple[tuple[int, ...], ...]
    """Groups that are used at the same time."""

"""How large groups of parameters are made: sizes in elements, and which neighbours are joined. Pure; who forms groups of modules
and who only plans for them share it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

LARGE_NUMEL = 1 << 20
"""Own parameters of a module outside all blocks from which it is a group of its own."""
TINY_NUMEL = 1 << 14
"""Groups below this are joined with their neighbour."""
HUGE_NUMEL = 1 << 28
"""Blocks above this are split along their children."""
MOST_GROUPS = 256
"""About: what is decided for every group, time and again, must not cost more than computing it."""


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """Sizes in elements: groups below ``tiny_numel`` are joined, modules outside the blocks with ``large_numel`` or more
    parameters of their own are groups, blocks above ``huge_numel`` are split along their children."""

    tiny_numel: int = TINY_NUMEL
    large_numel: int = LARGE_NUMEL
    huge_numel: int = HUGE_NUMEL

    def for_model(self, numel: int) -> "GroupLimits":
        """These, or such that a model of so many elements has about MOST_GROUPS groups at most, or groups of LARGE_NUMEL, which
        are worth what they cost."""
        return replace(self, tiny_numel=max(self.tiny_numel, min(numel // MOST_GROUPS, LARGE_NUMEL)))

    def finer(self) -> Iterator["GroupLimits"]:
        """These, then ever finer ones; the last make a group of every module that has parameters of its own."""
        yield self
        for divisor in (8, 64):
            tiny_numel = self.tiny_numel // divisor
            yield GroupLimits(tiny_numel=tiny_numel, large_numel=self.large_numel, huge_numel=self.huge_numel)
        yield GroupLimits(tiny_numel=1, large_numel=self.large_numel // 32, huge_numel=self.huge_numel)
        yield GroupLimits(tiny_numel=0, large_numel=0, huge_numel=0)


def join_tiny(numels: Sequence[int], tiny_numel: int) -> list[list[int]]:
    """Which of the groups in a row become one, as indices into ``numels``.

    A group below ``tiny_numel`` takes in its successors until it is not; one that is large enough takes in tiny ones of as
    much again at most, so that very many tiny modules give several groups, not one of any size.
    """
    joined: list[list[int]] = []
    size = taken = 0  # of the last group: elements, and what it has taken in since it was large enough
    for index, numel in enumerate(numels):
        grows = bool(joined) and size < tiny_numel
        fits = bool(joined) and numel < tiny_numel and taken + numel <= tiny_numel
        if not (grows or fits):
            joined.append([index])
            size, taken = numel, 0
            continue
        joined[-1].append(index)
        size, taken = size + numel, 0 if grows else taken + numel
    return joined

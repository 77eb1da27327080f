"""In which order segments are given memory: plain data that one placement differs from another by."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamina.tiers.tier import Tier


class Claim(NamedTuple):
    """A segment's claim to memory, by its index: for its parameters, or for its optimizer state, which stays on NVMe with them.
    ``tier`` is the fastest that it may have; None for any."""

    segment: int
    state: bool
    tier: Tier | None = None

    @property
    def what(self) -> tuple[int, bool]:
        """What is claimed."""
        return self.segment, self.state


@dataclass(frozen=True, kw_only=True)
class Order:
    """``first`` and ``last`` are served before and after all others, which come as usual: parameters, then states, both from the
    front of the model. ``window``: so many of the largest fetched groups find room at the same time, where the budget allows it.
    ``divide``: the first state that does not fit may be divided. ``late``: segments whose gradients are kept, so that their
    updates run under the next forward pass; they stay on NVMe."""

    first: tuple[Claim, ...] = ()
    last: tuple[Claim, ...] = ()
    window: int = 3
    divide: bool = True
    late: tuple[int, ...] = ()

    def with_first(self, *claims: Claim) -> "Order":
        """These before all others."""
        return replace(self, first=(*claims, *_without(self.first, claims)), last=_without(self.last, claims))

    def with_last(self, *claims: Claim) -> "Order":
        """These after all others."""
        return replace(self, first=_without(self.first, claims), last=(*_without(self.last, claims), *claims))

    @property
    def named(self) -> frozenset[tuple[int, bool]]:
        """What is claimed first or last."""
        return frozenset(claim.what for claim in (*self.first, *self.last))


def _without(claims: tuple[Claim, ...], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    named = {claim.what for claim in others}
    return tuple(claim for claim in claims if claim.what not in named)


USUAL = Order()


def states_first(segments: Iterable[int]) -> Order:
    """These get memory for parameters and optimizer state before any other's parameters do."""
    return Order(first=tuple(Claim(index, state) for index in segments for state in (False, True)))

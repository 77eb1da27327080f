"""What is to be updated: one segment whose gradient is final, and with which hyper-parameters."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lamina.tiers.nvme.landing import Promise
from lamina.zero.adam.kernels import AdamHyper
from lamina.zero.gradients.plane import GradientPlane
from lamina.zero.groups.segment import Segment


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements [begin, end) of a shard that are updated with the same hyper-parameters."""

    begin: int
    end: int
    hyper: AdamHyper


@dataclass(kw_only=True, eq=False)
class UpdateJob:
    """One segment's update. ``done`` is called in the update thread once the gradient has been used.

    ``from_store``: take the old parameters from the current generation although a copy is in memory (the copy may
    hold a result that is to be replaced). ``in_place``, ``stored``: update the elements that lie in memory with their state,
    and those that the store has. ``copy``: the flat layout of the group's fetched copy, which takes the new parameters, too, for
    as long as it is not evicted; None where there is none that may be changed. ``promise``: of its writes, where the commit
    does not wait for it ([Note: late updates] in update.py). ``version``: the store's, whose values it works on.
    """

    segment: Segment
    gradient: GradientPlane
    runs: Sequence[Run]
    grad_multiplier: float
    done: Callable[["UpdateJob"], None]
    from_store: bool = False
    in_place: bool = True
    stored: bool = True
    copy: "weakref.ref[torch.Tensor] | None" = None
    promise: Promise | None = None
    version: int = 0
    chunks_left: int = 0
    asked_for: float = field(default_factory=time.perf_counter)

    @property
    def late(self) -> bool:
        """Whether the generation that it makes is read from already."""
        return self.promise is not None

    @property
    def renewed(self) -> bool:
        """Once it is done: whether the fetched copy has all of its results."""
        return self.copy is not None

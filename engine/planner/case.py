"""All that a plan's figures depend on, and what follows directly from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.placement import DEVICE, HOST, NVME, Placement
from lamina.engine.planner.rank_slice import RankSlice, rank_slice
from lamina.engine.planner.state_bytes import plane_bytes_per_param
from lamina.engine.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a footprint or a step time depends on."""

    model: ModelShape
    load: Workload
    place: Placement
    machine: Machine
    buffers: Buffers = field(default_factory=Buffers)

    @cached_property
    def slice(self) -> RankSlice:
        """The fullest rank's groups."""
        return rank_slice(self.model, self.place, self.machine.ranks)

    @cached_property
    def planes(self) -> Mapping[str, int]:
        """Bytes of each plane per trainable parameter."""
        return plane_bytes_per_param(self.load.dtype, self.load.optimizer)

    @property
    def param_copy(self) -> bool:
        """The tier of the update keeps a ``param`` plane of its own.

        On nvme always, so that a generation is whole; in host memory when the parameters are on a GPU,
        which the CPU optimizer cannot reach. Without a GPU the device tier is host memory, which it can.
        """
        if self.place.optimizer == NVME:
            return self.place.param != NVME
        away = self.place.param == DEVICE and self.place.optimizer == HOST
        return away and not self.machine.shared_memory

    @property
    def gathers(self) -> bool:
        """Parameters are put together before use: split over ranks, or homed where compute cannot reach
        them."""
        reachable = self.place.param == DEVICE or (self.machine.shared_memory and self.place.param == HOST)
        return self.place.stage == 3 and (self.slice.ranks > 1 or not reachable)

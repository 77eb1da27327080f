"""All that a plan's figures depend on, and what follows directly from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.placement import DEVICE, HOST, NVME, Placement
from lamina.engine.planner.rank_slice import RankSlice, rank_slice
from lamina.engine.planner.state_bytes import DType, plane_bytes_per_param
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
    def early_update(self) -> bool:
        """Gradients are used up under the backward pass as they come, and are never all held.

        Not with a barrier, a loss scaler or sums over micro-batches, and only where a generation can be
        dropped.
        """
        load = self.load
        free = not load.barrier and load.dtype is not DType.FP16 and load.accumulation == 1
        return free and self.place.optimizer == NVME and self.place.grad == HOST and self.buffers.generations > 1

    def held_gradients(self) -> int:
        """Elements of gradients that are held at once off the device."""
        part = self.slice
        shards = part.trainable if self.place.stage < 2 else part.trainable_shards
        if not self.early_update:
            return sum(shards)
        return shards[0] + sum(sorted(shards[1:])[-2:])

    @property
    def gathers(self) -> bool:
        """Parameters are put together before use: split over ranks, or homed where compute cannot reach
        them."""
        reachable = self.place.param == DEVICE or (self.machine.shared_memory and self.place.param == HOST)
        return self.place.stage == 3 and (self.slice.ranks > 1 or not reachable)

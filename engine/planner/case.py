"""All that a plan's figures depend on, and what follows directly from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lamina.engine.planner.activations import ActivationBytes, activation_bytes
from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.placement import DEVICE, HOST, NVME, Placement
from lamina.engine.planner.rank_slice import RankSlice, rank_slice
from lamina.engine.planner.segments import segments_of
from lamina.engine.planner.state_bytes import MOMENTS, TIERED, DType, plane_bytes_per_param
from lamina.engine.planner.workload import Workload
from lamina.tiers.placement.homes import Home, SegmentSize, Wishes
from lamina.tiers.placement.needs import Needs
from lamina.tiers.tier import Tier

INPUTS_UNDER_WAY = 4
"""Inputs of blocks in host memory on their way to nvme and back: one filled or used, two written, one read ahead."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a footprint or a step time depends on."""

    model: ModelShape
    load: Workload
    place: Placement
    machine: Machine
    buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        if self.machine.shared_memory and self.place.grad == DEVICE:
            object.__setattr__(self, "place", replace(self.place, grad=HOST))

    @cached_property
    def slice(self) -> RankSlice:
        """The fullest rank's groups."""
        return rank_slice(self.model, self.place, self.machine.ranks)

    @cached_property
    def planes(self) -> Mapping[str, int]:
        """Bytes of each plane per trainable parameter."""
        return plane_bytes_per_param(self.load.dtype, self.load.optimizer)

    @property
    def own_planes(self) -> tuple[str, ...]:
        """Planes that are tensors of torch's optimizer and not the engine's: its moments, in host memory where it runs here."""
        return () if self.load.optimizer in TIERED else tuple(name for name in self.planes if name in MOMENTS)

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

    @cached_property
    def segments(self) -> tuple[SegmentSize, ...]:
        """The fullest rank's segments, as the tier layer sees them."""
        return tuple(segments_of(self.slice, self.load, self.place, self.planes, self.own_planes))

    @cached_property
    def activations(self) -> ActivationBytes:
        """What autograd keeps on one rank."""
        in_flight = min(self.place.pipeline, self.load.accumulation)
        return activation_bytes(
            self.model, self.load, layers=self.slice.layers, tensor=self.place.tensor, in_flight=in_flight
        )

    def saved_input_bytes(self) -> int:
        """Host memory for inputs of blocks that are computed again: all of them, or those on their way to nvme."""
        if not self.load.checkpoint_interval or self.place.activations == DEVICE:
            return 0
        return self.activations.saved if self.place.activations == HOST else INPUTS_UNDER_WAY * self.activations.input

    @cached_property
    def wishes(self) -> Wishes:
        """What the engine asks of the tier layer for this placement."""
        place, load, own = self.place, self.load, self.buffers
        spread = place.stage == 3 and self.slice.ranks > 1
        reachable = (Tier.DEVICE, Tier.HOST) if self.machine.shared_memory else (Tier.DEVICE,)
        # A barrier, a loss scaler and updates in place all want every gradient before the first update.
        free = not load.barrier and load.dtype is not DType.FP16 and own.generations > 1
        return Wishes(
            param_tiers=(Tier(place.param),),
            state_tiers=(Tier(place.optimizer),),
            overlap_update=free,
            sub_group_numel=own.sub_group,
            staging_count=own.update_depth,
            retain_gradients=load.accumulation > 1 or self.machine.ranks > 1,
            saved_input_bytes=self.saved_input_bytes(),
            separate_device=not self.machine.shared_memory,
            in_place_tiers=() if spread else reachable,
        )

    @cached_property
    def needs(self) -> Needs:
        """The tier layer's own arithmetic over this placement: what the engine will allocate."""
        home = Home(param=Tier(self.place.param), state=Tier(self.place.optimizer))
        return Needs(
            segments=self.segments,
            homes={segment.name: home for segment in self.segments},
            wishes=self.wishes,
            generations=self.buffers.generations,
            together=self.slice.places_together,
            spill=self.place.grad == NVME,
        )

    @property
    def updates_early(self) -> bool:
        """Updates start under the backward pass: where they can be undone, on nvme, with gradients in memory."""
        return self.wishes.overlap_update and self.place.optimizer == NVME and self.place.grad == HOST

    @property
    def early_update(self) -> bool:
        """Gradients are used up under the backward pass as they come, and are never all held."""
        return self.updates_early and not self.wishes.retain_gradients

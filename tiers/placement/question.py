"""What a placement is asked about, and what is predicted for one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lamina.tiers.links.bandwidth import BandwidthModel
from lamina.tiers.simulation.simulate import Simulation, simulate
from lamina.tiers.simulation.step_model import ComputeTimes, StepModel, model_step

from .homes import Budgets, Home, SegmentSize, Wishes
from .order import USUAL, Order
from .placement import Placement
from .placer import Placer


@dataclass(frozen=True, kw_only=True)
class PlacementQuestion:
    """All that decides a placement: sizes, limits, wishes, and how fast everything is."""

    segments: tuple[SegmentSize, ...]
    budgets: Budgets
    wishes: Wishes
    links: BandwidthModel
    times: ComputeTimes
    generations: int = 2
    together: tuple[tuple[int, ...], ...] = ()
    micro_batches: int = 1
    lookahead: int = 64
    disks: int = 1
    """Disks that the link to NVMe is made of."""
    order: tuple[int, ...] = ()
    """Groups as one micro-batch uses them, from a trace; empty for all of them there and back."""
    fixed: Mapping[str, Home] = field(default_factory=dict)
    """Homes of segments that are not asked about."""

    @cached_property
    def placer(self) -> Placer:
        """What makes placements. Raises PlacementError when the budgets cannot work."""
        return Placer(
            self.segments,
            self.budgets,
            self.wishes,
            generations=self.generations,
            together=self.together,
            fixed=self.fixed,
        )

    def place(self, order: Order = USUAL) -> Placement:
        """One placement; raises PlacementError when the budgets cannot work."""
        return self.placer.place(order)

    def placement_at(self, homes: Mapping[str, Home]) -> Placement:
        """What segments at given homes need. Whether the budgets hold that is not looked at."""
        return self.placer.place_at(homes)

    def step(self, placement: Placement) -> StepModel:
        """What a step does under a placement. Device memory that is left over widens the window."""
        wishes, budgets = self.wishes, self.budgets
        window = placement.device_items.get("window of fetched groups", 0)
        if budgets.device_bytes is not None:
            window += max(0, budgets.device_bytes - placement.device_bytes)
        return model_step(
            self.segments,
            placement,
            self.times,
            micro_batches=self.micro_batches,
            overlap_update=wishes.overlap_update,
            retain_gradients=wishes.retain_gradients,
            window_bytes=window,
            host_budget=budgets.host_bytes,
            in_place_tiers=wishes.in_place_tiers,
            separate_device=wishes.separate_device,
            lookahead=self.lookahead,
            order=self.order,
        )

    def predict(self, placement: Placement) -> Simulation:
        """The simulated step under a placement."""
        return simulate(self.step(placement), self.links)

"""Which segments may be updated under the backward pass, before ``step()``."""

from collections.abc import Mapping

from lamina.tiers import Home, Tier
from lamina.zero.groups.segment import Segment
from lamina.zero.homes.residence import Residence


class EarlyUpdates:
    """``segments``: those that may be, at their present homes."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self.segments: list[Segment] = []
        self.homes_changed()

    def homes_changed(self) -> None:
        self.segments = [s for s in self._residence.segments if self._may_start(s, s.state_tier)]

    def transient_gradients(self, homes: Mapping[str, Home]) -> set[int]:
        """Ids of the segments whose gradient is given up as soon as it was used, at these homes."""
        if self._residence.options.wishes.retain_gradients:
            return set()
        return {
            id(s)
            for s in self._residence.segments
            if self._may_start(s, homes[s.name].state) and not homes[s.name].kept
        }

    def _may_start(self, segment: Segment, state_tier: Tier) -> bool:
        """Only what is on NVMe: there the old state stays until the commit."""
        residence = self._residence
        wanted = residence.options.wishes.overlap_update and not residence.placement.scratch_bytes
        return wanted and segment.trainable and state_tier is Tier.NVME

"""Which segments may be updated under the backward pass, before ``step()``."""

from collections.abc import Mapping

from lamina.tiers import Home, Tier
from lamina.zero.groups.segment import Segment
from lamina.zero.homes.move_rules import home_of
from lamina.zero.homes.residence import Residence


class EarlyUpdates:
    """``segments``: those that may be, at their present homes."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self.segments: list[Segment] = []
        self.homes_changed()

    def homes_changed(self) -> None:
        self.segments = [s for s in self._residence.segments if self._may_start(s, home_of(s))]

    def transient_gradients(self, homes: Mapping[str, Home]) -> set[int]:
        """Ids of the segments whose gradient is given up as soon as it was used, at these homes."""
        if self._residence.options.wishes.retain_gradients:
            return set()
        return {id(s) for s in self._residence.segments if self._may_start(s, homes[s.name]) and not homes[s.name].kept}

    def _may_start(self, segment: Segment, home: Home) -> bool:
        """Only what is on NVMe: there the old state stays until the commit. Not what waits for the step all the same."""
        residence = self._residence
        wanted = residence.options.wishes.overlap_update and not residence.placement.scratch_bytes
        return wanted and segment.trainable and home.state is Tier.NVME and not home.late

"""Which tier is home to what, and what that takes of each tier: plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamina.tiers.tier import Tier

from .homes import Home
from .needs import OWN_GRADIENTS, OWN_STATE


class PlacementError(ValueError):
    """The budgets cannot work; the message shows the sum and the least that would. ``least``: the latter, in bytes, of each tier
    that is too small."""

    def __init__(self, message: str, *, least: Mapping[Tier, int] | None = None) -> None:
        super().__init__(message)
        self.least = dict(least or {})


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Homes by the names of segments. All sizes in bytes of this rank."""

    homes: Mapping[str, Home]
    device_items: Mapping[str, int]
    host_items: Mapping[str, int]
    nvme_items: Mapping[str, int]
    sub_group_numel: int
    staging_count: int
    fetch_buffer_count: int = 0
    scratch_bytes: int = 0
    reasons: Sequence[str] = field(default_factory=tuple)
    last_resort: bool = False
    """Nothing else fits: smaller groups may."""

    @property
    def device_bytes(self) -> int:
        return sum(self.device_items.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host_items.values())

    @property
    def own_bytes(self) -> int:
        """Of ``host_bytes``, what an optimizer of torch allocates itself: it takes no room in the arena."""
        return self.host_items.get(OWN_STATE, 0) + self.host_items.get(OWN_GRADIENTS, 0)

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme_items.values())

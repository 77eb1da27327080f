"""When stripes should be cut otherwise, since disks turn out slower or faster. Pure: fed with measurements."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .stripe_weights import device_shares, level, path_weights

WINDOW = 3
"""Steps that must agree before stripes change; their medians are gone by."""
WORTH = 0.15
"""The slowest device must take this share longer than it would with the best stripes: new files are written at half speed."""
SETTLING_STEPS = 3
"""Steps after a change that say nothing: each generation's files are made anew in its turn."""
MINIMUM_BYTES = 1 << 20
"""A device that moves less in a step tells its latency, not its rate."""


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """What one device did in a step: bytes read and written, and the seconds that it was busy."""

    nbytes: int
    busy_s: float


@dataclass(kw_only=True)
class StripeBalance:
    """One per store. ``devices``: the device under each path, whose paths get equal stripes."""

    devices: tuple[int, ...]
    _rates: deque[dict[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _proposed: tuple[float, ...] | None = None
    _settling: int = 0

    @property
    def settling(self) -> bool:
        """Whether the steps under way are those of a change."""
        return self._settling > 0

    def after_step(self, work: Mapping[int, DeviceWork], shares: Sequence[float]) -> tuple[float, ...] | None:
        """Take one step's work per device; new weights, one per path, when every step of the window asks for others than
        ``shares`` (of the current generation, per path). Paths without a share stay without.

        What was proposed is not proposed again, also where the store had no room to follow.
        """
        if self._settling:
            self._settling -= 1
            return None
        used = [device for device, share in device_shares(self.devices, shares).items() if share > 0]
        done = [work.get(device) for device in used]
        rates = {
            device: item.nbytes / item.busy_s
            for device, item in zip(used, done, strict=True)
            if item is not None and item.nbytes >= MINIMUM_BYTES and item.busy_s > 0
        }
        if len(used) < 2 or len(rates) < len(used):
            return None
        self._rates.append(rates)
        if len(self._rates) < WINDOW or any(set(before) != set(rates) for before in self._rates):
            return None
        median = {device: statistics.median(step[device] for step in self._rates) for device in used}
        present = [shares] if self._proposed is None else [shares, self._proposed]
        if any(self._loss(split, step) <= WORTH for split in present for step in (*self._rates, median)):
            return None
        self._rates.clear()
        self._settling = SETTLING_STEPS
        self._proposed = self._weights(shares, median)
        return self._proposed

    def _weights(self, shares: Sequence[float], rates: Mapping[int, float]) -> tuple[float, ...]:
        """Of the paths that have a share, in proportion to their devices' rates; they sum to 1."""
        devices = [device for device, share in zip(self.devices, shares, strict=True) if share > 0]
        weights = path_weights(devices, level(rates))
        total, of_used = sum(weights), iter(weights)
        return tuple(next(of_used) / total if share > 0 else 0.0 for share in shares)

    def _loss(self, shares: Sequence[float], rates: Mapping[int, float]) -> float:
        """How much longer, as a share, the slowest device takes with these shares than with the best ones."""
        held = device_shares(self.devices, shares)
        best = device_shares(self.devices, self._weights(shares, rates))
        return max(held[device] / best[device] for device in rates) - 1

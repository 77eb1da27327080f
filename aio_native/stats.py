"""What an AsyncIO has done so far, as plain data."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DirectionStats:
    """Counters of one direction (read, write or sync) of one device."""

    bytes: int
    operations: int
    """Pieces done: a request is split into pieces of at most block_bytes."""
    errors: int
    """Pieces that failed or came short."""
    latency_s: float
    """Sum over the pieces, from their start to their end."""
    max_latency_s: float
    bounced_bytes: int
    """Bytes that went through bounce memory."""
    busy_s: float
    """Time with at least one piece in flight."""
    alone_s: float
    """Of it, that with none of the opposite direction; 0 for sync."""
    alone_bytes: int
    """Moved in that time."""
    histogram: tuple[int, ...]
    """Pieces by latency: entry i counts those of 2**i to 2**(i+1) microseconds; entry 0 also the faster ones."""

    @property
    def mean_latency_s(self) -> float:
        return self.latency_s / self.operations if self.operations else 0.0

    @property
    def bytes_per_s(self) -> float:
        """While it was busy."""
        return self.bytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceStats:
    """Counters of one device."""

    device: int
    """st_dev"""
    idle_s: float
    """Time with nothing in flight since the device was first used."""
    busy_s: float
    mean_depth: float
    """Pieces in flight, on average while busy."""
    inflight: int
    max_inflight: int
    inflight_bytes: int
    max_inflight_bytes: int
    read: DirectionStats
    write: DirectionStats
    sync: DirectionStats


@dataclass(frozen=True, kw_only=True)
class IOStats:
    """Counters since the AsyncIO was opened."""

    backend: str
    devices: tuple[DeviceStats, ...]

    @property
    def bytes_read(self) -> int:
        return sum(device.read.bytes for device in self.devices)

    @property
    def bytes_written(self) -> int:
        return sum(device.write.bytes for device in self.devices)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _direction(native: Any) -> DirectionStats:
    return DirectionStats(
        bytes=native.bytes,
        operations=native.operations,
        errors=native.errors,
        latency_s=native.latency_ns * 1e-9,
        max_latency_s=native.max_latency_ns * 1e-9,
        bounced_bytes=native.bounced_bytes,
        busy_s=native.busy_ns * 1e-9,
        alone_s=native.alone_ns * 1e-9,
        alone_bytes=native.alone_bytes,
        histogram=tuple(native.histogram),
    )


def device_stats(native: Any) -> DeviceStats:
    """From a struct lamina_device_stats."""
    return DeviceStats(
        device=native.device,
        idle_s=native.idle_ns * 1e-9,
        busy_s=native.busy_ns * 1e-9,
        mean_depth=native.depth_ns / native.busy_ns if native.busy_ns else 0.0,
        inflight=native.inflight,
        max_inflight=native.max_inflight,
        inflight_bytes=native.inflight_bytes,
        max_inflight_bytes=native.max_inflight_bytes,
        read=_direction(native.read),
        write=_direction(native.write),
        sync=_direction(native.sync),
    )

"""A disk and a way to a device whose times can be reckoned in the head."""

from lamina.tiers import BandwidthModel, Curve, Link
from lamina.tiers.links.bandwidth import DISK, TO_DEVICE

MIB = 1 << 20


def links(read: float = MIB, write: float = MIB, *, mix_gain: float = 1.0, latency_s: float = 0.0) -> BandwidthModel:
    """By default a disk of one MiB per second each way, so that MiB are seconds."""
    disk = Link(
        name=DISK,
        read=Curve.flat(read, latency_s=latency_s),
        write=Curve.flat(write, latency_s=latency_s),
        mix_gain=mix_gain,
    )
    return BandwidthModel([disk, Link(name=TO_DEVICE, read=Curve.flat(2 * MIB), write=Curve.flat(2 * MIB))])

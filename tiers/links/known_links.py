"""What is known of this machine's links before the first step: the profile of `lamina nvme`, else a short probe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lamina.aio_native import AsyncIO
from lamina.tiers.placement.stripe_weights import device_shares, weighted
from lamina.tiers.tier import NvmePath

from .bandwidth import DISK, TO_DEVICE, BandwidthModel, Curve, Link, disk_link
from .device_identity import DeviceIdentity, existing_parent, identify
from .probe import PROBE_BYTES, DiskSpeed, probe_disk
from .profile import Profile, ProfileError
from .profile_file import load_profile, profile_path

MIN_PROBE_BYTES = 1 << 20
ASSUMED_DEVICE_RATE = 12e9
"""Bytes per second to and from an accelerator where no profile has them: a PCIe 3.0 link of 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class KnownLinks:
    """The links' model, the disks' speeds (each disk once) and ``source``: a sentence that says where they come from.

    ``disk_shares``: share of the bytes of each of ``disks``, their sum is 1. ``paths``: those that were asked about, with the
    weights that state is striped by. ``adam_elements_per_s``: of this machine's cores, where a profile has it.
    """

    model: BandwidthModel
    disks: tuple[DiskSpeed, ...] = ()
    disk_shares: tuple[float, ...] = ()
    paths: tuple[NvmePath, ...] = ()
    source: str = "no link is used"
    adam_elements_per_s: float | None = None

    def shared_as(self, numbers: Sequence[float]) -> "KnownLinks":
        """The same with the disk's ``numbers`` replaced by those that all ranks agreed on."""
        read, write, read_latency, write_latency, gain = numbers
        link = replace(
            self.model.link(DISK),
            read=Curve.flat(read, latency_s=read_latency),
            write=Curve.flat(write, latency_s=write_latency),
            mix_gain=min(2.0, max(1.0, gain)),
            sharers=1,
        )
        others = [self.model.link(name) for name in self.model.names if name != DISK]
        return replace(self, model=BandwidthModel([link, *others]))

    @property
    def numbers(self) -> list[float]:
        """What ranks compare: rates and latencies of one rank's share of the disk, and the gain of mixing."""
        link = self.model.link(DISK)
        return [
            link.read.rate() * link.share,
            link.write.rate() * link.share,
            link.read.latency_s,
            link.write.latency_s,
            link.mix_gain,
        ]


def learn_links(
    paths: Sequence[NvmePath],
    open_io: Callable[[], AsyncIO],
    *,
    nbytes: int,
    sharers: int = 1,
    separate_device: bool = False,
) -> KnownLinks:
    """Links of a rank that shares them with ``sharers`` in all.

    ``nbytes``: state to be kept on the paths; a probe moves less than that, and less than a path's quota. Never raises for a
    disk that cannot be measured: it is left out, and ``source`` says so.
    """
    known = KnownLinks(model=BandwidthModel([]))
    if paths:
        profile: Profile | None = None
        devices = [identify(path.path) for path in paths]
        try:
            profile = load_profile([path.path for path in paths])
        except (ProfileError, OSError) as error:
            speeds, source = _probed(paths, devices, open_io, nbytes, str(error))
        else:
            speeds = {disk.identity: disk.speed() for disk in profile.disks if disk.identity in devices}
            source = f"rates of the links: from the profile {profile_path(profile.identities)}"
        known = _striped(paths, devices, speeds, source)
        if profile is not None:
            shares = dict(zip(speeds, known.disk_shares, strict=True))
            model = BandwidthModel.from_profile(profile, sharers=sharers, shares=shares)
            known = replace(known, model=model, adam_elements_per_s=profile.machine.adam_elements)
    if separate_device and TO_DEVICE not in known.model.names:
        rate = Curve.flat(ASSUMED_DEVICE_RATE)
        link = Link(name=TO_DEVICE, read=rate, write=rate, mix_gain=2.0)
        links = [known.model.link(name) for name in known.model.names]
        assumed = f"the way to the device is taken for {ASSUMED_DEVICE_RATE / 1e9:.0f} GB/s each way"
        source = f"{known.source}; {assumed}" if known.model.names else assumed
        known = replace(known, model=BandwidthModel([*links, link]), source=source)
    return known


def _striped(
    paths: Sequence[NvmePath],
    devices: Sequence[DeviceIdentity],
    speeds: Mapping[DeviceIdentity, DiskSpeed],
    source: str,
) -> KnownLinks:
    """The disks as one link that state is striped over; a disk without a speed counts as no slower than the others."""
    striped, told = weighted(paths, devices, speeds)
    held = device_shares(devices, [path.weight for path in striped])
    measured = sum(held[device] for device in speeds)
    shares = tuple(held[device] / measured for device in speeds)
    disks = tuple(speeds.values())
    return KnownLinks(
        model=BandwidthModel([disk_link(disks, shares)] if disks else []),
        disks=disks,
        disk_shares=shares,
        paths=striped,
        source=f"{source}; {told}" if told else source,
    )


def _probed(
    paths: Sequence[NvmePath],
    devices: Sequence[DeviceIdentity],
    open_io: Callable[[], AsyncIO],
    nbytes: int,
    why: str,
) -> tuple[dict[DeviceIdentity, DiskSpeed], str]:
    """Each disk's speed and where it is from: a few transfers in a path's folder, or the nearest that exists; together they
    take as long as one path's."""
    different = dict(zip(devices, paths, strict=True))
    share = max(MIN_PROBE_BYTES, nbytes // len(paths) // 8 // MIN_PROBE_BYTES * MIN_PROBE_BYTES)
    size = min(max(MIN_PROBE_BYTES, PROBE_BYTES // len(different)), share)
    speeds, left_out = {}, []
    with open_io() as io:
        for device, path in different.items():
            if path.bytes is not None and path.bytes < size:
                left_out.append(f"{path.path} (no room within its bytes)")
                continue
            try:
                speeds[device] = probe_disk(io, existing_parent(path.path), size)
            except OSError as error:
                left_out.append(f"{path.path} ({error.strerror or error})")
    told = f"rates of the links: from a probe of {size:,} bytes ({why})"
    if left_out:
        told += f"; not measured: {', '.join(left_out)}"
    return speeds, told

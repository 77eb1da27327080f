"""What a step takes at least, without simulating it: for telling which placements cannot be the best. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lamina.tiers.links.bandwidth import DISK, TO_DEVICE, BandwidthModel
from lamina.tiers.links.mix import mixed_seconds
from lamina.tiers.simulation.step_model import GroupModel, StepModel, UpdateModel


class Load(NamedTuple):
    """What a step must move and compute besides its passes. Bytes and seconds."""

    read: float = 0
    """By updates, but for parameters, of which there may be a copy."""
    written: float = 0
    adam_s: float = 0.0
    fetched: float = 0
    """From NVMe, for use."""
    up: float = 0
    """On to a device."""

    def plus(self, other: "Load") -> "Load":
        """Both."""
        return Load(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def load_of_updates(updates: tuple[UpdateModel, ...]) -> Load:
    """What updates move and compute."""
    parts = [part for update in updates for part in update.sub_groups]
    return Load(
        read=sum(part.read_bytes - part.param_bytes for part in parts),
        written=sum(part.write_bytes for part in parts),
        adam_s=sum(part.adam_s for part in parts),
    )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Turns a load into the seconds that no step is shorter than, however well everything overlaps. Rates in bytes per second,
    of the disk and to a device; 0 where there is no such link. ``hidden``: bytes that are read ahead while the passes compute."""

    compute_s: float
    early: bool
    shared_cores: bool
    hidden: int
    passes: int
    """How often all groups are used in a step, one time after the other."""
    read_rate: float
    write_rate: float
    mix_gain: float
    up_rate: float

    @classmethod
    def of(cls, step: StepModel, links: BandwidthModel, *, early: bool | None = None) -> "Bound":
        """Of all steps with these accesses and buffers. ``early``: updates may start under the passes; None: as in this step."""
        disk = links.link(DISK) if DISK in links.names else None
        up = links.link(TO_DEVICE) if TO_DEVICE in links.names else None
        return cls(
            compute_s=sum(access.compute_s for access in step.accesses),
            early=step.early if early is None else early,
            shared_cores=step.shared_cores,
            hidden=step.buffer_count * step.buffer_bytes,
            passes=_passes(step),
            read_rate=disk.read.rate() * disk.share if disk is not None else 0.0,
            write_rate=disk.write.rate() * disk.share if disk is not None else 0.0,
            mix_gain=disk.mix_gain if disk is not None else 1.0,
            up_rate=up.read.rate() * up.share if up is not None else 0.0,
        )

    def seconds(self, load: Load) -> float:
        """Of a step with this load."""
        read_s, fetch_s = _over(load.read, self.read_rate), _over(load.fetched, self.read_rate)
        written_s, up_s = _over(load.written, self.write_rate), _over(load.up, self.up_rate)
        if self.early:
            both = self.compute_s + load.adam_s if self.shared_cores else max(self.compute_s, load.adam_s)
            return max(both, mixed_seconds(fetch_s + read_s, written_s, self.mix_gain), up_s)
        read_s = max(0.0, read_s - _over(self.hidden, self.read_rate))
        return max(self.compute_s, fetch_s, up_s) + max(load.adam_s, mixed_seconds(read_s, written_s, self.mix_gain))


def least_seconds(step: StepModel, links: BandwidthModel) -> float:
    """Of the last of several steps in a row."""
    bound = Bound.of(step, links)
    load = load_of_updates(step.updates)._replace(
        fetched=bound.passes * _missing(step, lambda group: group.read_bytes),
        up=bound.passes * _missing(step, lambda group: group.up_bytes),
    )
    return bound.seconds(load) + step.commit_s


def _over(nbytes: float, rate: float) -> float:
    return nbytes / rate if nbytes and rate else 0.0


def _passes(step: StepModel) -> int:
    used = {access.group for access in step.accesses}
    passes, unused = 0, set(used)
    for access in step.accesses:
        unused.discard(access.group)
        if not unused:
            passes, unused = passes + 1, set(used)
    return passes


def _missing(step: StepModel, bytes_of: Callable[[GroupModel], int]) -> float:
    """Bytes that groups have to be fetched whenever all of them are used, since the window does not hold them."""
    fetched = [group for group in step.groups if bytes_of(group)]
    missing = sum(group.window_bytes for group in fetched) - step.window_bytes
    return missing * min(bytes_of(group) / group.window_bytes for group in fetched) if missing > 0 else 0.0

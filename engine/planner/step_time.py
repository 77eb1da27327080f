"""Predicted seconds of one optimizer step, the link that binds, and the efficiency that arithmetic
intensity allows.

Within a part of the step (the passes, the update) channels work at once, so a part lasts as long as its
slowest channel plus a small share of the others (``overlap_loss``). The lower bound (DESIGN section 7)
leaves that share out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.engine.planner.case import Case
from lamina.engine.planner.channel_bytes import Channel, ChannelBytes, channel_bytes
from lamina.engine.planner.flops import step_flops
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.pass_items import update_sub_group
from lamina.engine.planner.pipeline_bubble import bubble_fraction


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One optimizer step of all ranks."""

    passes: Mapping[str, float]
    """Seconds that each channel is busy during forward and backward; drives' reads and writes are one
    channel."""
    update: Mapping[str, float]
    passes_s: float
    update_s: float
    step_s: float
    """Predicted."""
    lower_bound_s: float
    binding: str
    """The channel that the step waits for most."""
    tokens_per_s: float
    """Of all ranks."""
    mfu: float
    """Model operations / (step seconds x peak of all devices)."""
    bubble: float
    """Idle share of the pipeline."""
    efficiency: Mapping[str, float]
    """For each channel of the passes: share of compute peak if that channel did not overlap at all
    (equation 6)."""

    @property
    def bound_ratio(self) -> float:
        """Predicted step over its lower bound."""
        return self.step_s / self.lower_bound_s if self.lower_bound_s else 1.0


DRIVE = "nvme drive"


def step_time(case: Case) -> StepTime:
    """Predicted times. Raises PlanError that names the rate that is missing."""
    moved = channel_bytes(case)
    compute, model_flops = compute_seconds(case)
    bubble = float(bubble_fraction(case.place.pipeline, case.load.accumulation))
    passes = _on_cores(
        case, {Channel.COMPUTE.value: compute / (1 - bubble)}, _seconds(case.machine, moved, update=False)
    )
    update = _on_cores(case, {}, _seconds(case.machine, moved, update=True))
    if not case.updates_early:
        _move_under_passes(case, passes, update)
    passes_s, update_s = (_part(part, case.machine.overlap_loss) for part in (passes, update))
    worst = max(passes.values()) + max(update.values(), default=0.0)
    together = {name: passes.get(name, 0.0) + update.get(name, 0.0) for name in {**passes, **update}}
    if not case.updates_early:
        step, bound = passes_s + update_s, worst
    else:
        # The update runs under the backward pass: what both need of one channel adds up. It starts with the first group
        # whose gradient is final.
        overlapped = _part(together, case.machine.overlap_loss)
        begun = passes_s * _share_before_updates(case) + update_s
        step, bound = min(passes_s + update_s, max(overlapped, begun)), max(together.values())
    tokens = case.load.tokens * case.load.accumulation * case.slice.ranks
    peak = case.machine.peak_flops(case.load.itemsize) * case.machine.ranks
    return StepTime(
        passes=passes,
        update=update,
        passes_s=passes_s,
        update_s=update_s,
        step_s=step,
        lower_bound_s=bound,
        binding=_binding(passes, update, together, barrier=not case.updates_early),
        tokens_per_s=tokens / step,
        mfu=model_flops * tokens / (step * peak),
        bubble=bubble,
        efficiency={
            name: compute / (compute + seconds)
            for name, seconds in passes.items()
            if seconds and name != Channel.COMPUTE
        },
    )


def _move_under_passes(case: Case, passes: dict[str, float], update: dict[str, float]) -> None:
    """What the update's buffers hold is read before its passes have ended, and written when the next ones have begun, as far
    as the drive has time then."""
    drive = update.get(DRIVE, 0.0)
    if drive:
        numel = case.slice.trainable_numel / (case.slice.ranks if case.place.stage >= 1 else 1)
        share = min(1.0, case.buffers.update_depth * update_sub_group(case) / max(numel, 1))
        idle = max(passes.values()) - passes.get(DRIVE, 0.0)
        hidden = min(drive * share, idle)
        passes[DRIVE] = passes.get(DRIVE, 0.0) + hidden
        update[DRIVE] = drive - hidden


def compute_seconds(case: Case) -> tuple[float, float]:
    """Seconds of one rank's arithmetic, and model operations per token."""
    flops = step_flops(case.model, case.load)
    tokens = case.load.tokens * case.load.accumulation
    rate = case.machine.peak_flops(case.load.itemsize) * case.machine.achievable
    executed = flops.hardware_per_token * tokens / case.place.model_parallel
    if case.machine.shared_memory:
        rate /= case.machine.devices_per_host  # ranks of one host share its cores
    return executed / rate, flops.model_per_token


def _on_cores(case: Case, work: Mapping[str, float], links: Mapping[str, float]) -> dict[str, float]:
    """Both together. Where ranks are processes on one host's cores, collectives are work of these cores, too."""
    found = {**work, **links}
    if case.machine.shared_memory and case.machine.hosts == 1 and Channel.COLLECTIVE.value in found:
        compute = Channel.COMPUTE.value
        found[compute] = found.get(compute, 0.0) + found.pop(Channel.COLLECTIVE.value)
    return found


def _share_before_updates(case: Case) -> float:
    """Part of the passes after which the last block's gradient is final: all micro-batches but the last, then a forward pass
    and one block's way back."""
    forward = step_flops(case.model, case.load).forward_share
    in_last = forward + (1 - forward) / max(len(case.slice.blocks), 1)
    return (case.load.accumulation - 1 + in_last) / case.load.accumulation


def _part(seconds: Mapping[str, float], loss: float) -> float:
    longest = max(seconds.values(), default=0.0)
    return longest + loss * (sum(seconds.values()) - longest)


def _binding(
    passes: Mapping[str, float], update: Mapping[str, float], together: Mapping[str, float], *, barrier: bool
) -> str:
    if not barrier:
        return max(together, key=lambda name: together[name])
    parts = [part for part in (passes, update) if part]
    longest = max(parts, key=lambda part: max(part.values()))
    return max(longest, key=lambda name: longest[name])


def _seconds(machine: Machine, moved: ChannelBytes, *, update: bool) -> dict[str, float]:
    """Busy seconds by channel; unused channels are left out so that their rates need not be known."""
    part = moved.update if update else moved.passes
    devices = machine.devices_per_host
    result: dict[str, float] = {}
    single = {Channel.DEVICE_MEMORY: ("device_bandwidth", 1), Channel.DRAM: ("host_bandwidth", devices)}
    for channel, (rate, ranks) in single.items():
        if part[channel]:
            result[channel.value] = part[channel] * ranks / machine.rate(rate, f"the {channel} channel")
    for channel in (Channel.TO_DEVICE, Channel.TO_HOST):
        if part[channel]:
            result[channel.value] = part[channel] / machine.device_rate_from("host", active=devices)
    read, write = part[Channel.NVME_READ] * devices, part[Channel.NVME_WRITE] * devices
    read_s = read / machine.rate("nvme_read_bandwidth", "state on nvme") if read else 0.0
    write_s = write / machine.rate("nvme_write_bandwidth", "state on nvme") if write else 0.0
    if read or write:
        result[DRIVE] = max(read_s, write_s) if machine.nvme_full_duplex else read_s + write_s
    if part[Channel.COLLECTIVE]:
        result[Channel.COLLECTIVE.value] = part[Channel.COLLECTIVE] / _collective_rate(machine)
    return result


def _collective_rate(machine: Machine) -> float:
    """Bytes per second of one rank in a ring over all ranks: the slower of the links inside and between
    hosts."""
    rates = []
    if machine.devices_per_host > 1:
        rates.append(machine.rate("peer_bandwidth", "several ranks on a host"))
    if machine.hosts > 1:
        rates.append(machine.rate("network_bandwidth", "several hosts"))
    return min(rates)

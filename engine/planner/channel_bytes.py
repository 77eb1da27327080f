"""Bytes that one optimizer step moves over each channel, per rank, apart for the passes and the update."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lamina.engine.planner.case import Case
from lamina.engine.planner.placement import DEVICE, NVME
from lamina.engine.planner.state_bytes import (
    update_read_bytes_per_param,
    update_write_bytes_per_param,
)


class Channel(StrEnum):
    """What can bind a step."""

    COMPUTE = "compute"
    DEVICE_MEMORY = "device memory"
    DRAM = "host memory"
    TO_DEVICE = "host→device"
    TO_HOST = "device→host"
    NVME_READ = "nvme→host"
    NVME_WRITE = "host→nvme"
    COLLECTIVE = "between ranks"


@dataclass(frozen=True, kw_only=True)
class ChannelBytes:
    """Bytes per rank and optimizer step."""

    passes: Mapping[Channel, float]
    """Forward and backward of all micro-batches."""
    update: Mapping[Channel, float]

    def total(self, channel: Channel) -> float:
        """Both parts together."""
        return self.passes.get(channel, 0.0) + self.update.get(channel, 0.0)


def channel_bytes(case: Case) -> ChannelBytes:
    """What the placement makes every link carry."""
    return ChannelBytes(passes=_passes(case), update=_update(case))


def fetched_numel(case: Case) -> int:
    """Elements that one micro-batch fetches: blocks forward and again backward, what is outside them once."""
    part = case.slice
    return 2 * (part.numel - part.outside) + part.outside


def _passes(case: Case) -> dict[Channel, float]:
    part, load, place = case.slice, case.load, case.place
    gpu = not case.machine.shared_memory
    moved = dict.fromkeys(Channel, 0.0)
    ranks, size, times = part.ranks, load.itemsize, load.accumulation
    share = (ranks - 1) / ranks
    fetched = fetched_numel(case) * size * times
    if place.stage == 3:
        moved[Channel.COLLECTIVE] += fetched * share
        if place.param == NVME:
            moved[Channel.NVME_READ] += fetched / ranks
        if place.param != DEVICE and gpu:
            moved[Channel.TO_DEVICE] += fetched / ranks
    reductions = times if place.stage >= 2 or place.grad != DEVICE else 1
    gradients = part.trainable_numel * size
    moved[Channel.COLLECTIVE] += gradients * share * reductions * (2 if place.stage == 0 else 1)
    if place.grad != DEVICE:
        owned = gradients / (ranks if place.stage >= 1 else 1) * reductions
        held = part.trainable_numel / (ranks if place.stage >= 1 else 1) * load.grad_bytes
        if gpu:
            moved[Channel.TO_HOST] += owned
        moved[Channel.DRAM] += owned + held * (2 * times - 1)
        if place.grad == NVME:
            moved[Channel.NVME_WRITE] += held * times
            moved[Channel.NVME_READ] += held * (times - 1)
    if load.checkpoint_interval and place.activations != DEVICE:
        kept = case.activations.saved * times
        if gpu:
            moved[Channel.TO_HOST] += kept
            moved[Channel.TO_DEVICE] += kept
        if place.activations == NVME:
            moved[Channel.NVME_WRITE] += kept
            moved[Channel.NVME_READ] += kept
    return moved


def _update(case: Case) -> dict[Channel, float]:
    part, load, place = case.slice, case.load, case.place
    gpu = not case.machine.shared_memory
    moved = dict.fromkeys(Channel, 0.0)
    numel = part.trainable_numel / (part.ranks if place.stage >= 1 else 1)
    read = update_read_bytes_per_param(load.dtype, load.optimizer)
    write = update_write_bytes_per_param(load.dtype, load.optimizer)
    if place.optimizer == DEVICE:
        channel = Channel.DRAM if case.machine.shared_memory else Channel.DEVICE_MEMORY
        moved[channel] += numel * (read + write + load.grad_bytes)
    else:
        moved[Channel.DRAM] += numel * (read + write + load.grad_bytes)
    if place.optimizer == NVME:
        moved[Channel.NVME_READ] += numel * read
        moved[Channel.NVME_WRITE] += numel * write
        if place.grad == NVME:
            moved[Channel.NVME_READ] += numel * load.grad_bytes
        moved[Channel.DRAM] += moved[Channel.NVME_READ] + moved[Channel.NVME_WRITE]
    if place.param == DEVICE and place.optimizer != DEVICE and gpu:
        moved[Channel.TO_DEVICE] += numel * load.itemsize
    if place.stage in (1, 2):
        moved[Channel.COLLECTIVE] += part.trainable_numel * load.itemsize * (part.ranks - 1) / part.ranks
    return moved


def nvme_written_per_host(case: Case) -> float:
    """Bytes that one optimizer step writes to the drives of one host."""
    return channel_bytes(case).total(Channel.NVME_WRITE) * case.machine.devices_per_host


def uses_nvme(case: Case) -> bool:
    """Whether any state lives on nvme."""
    place = case.place
    return NVME in (place.param, place.optimizer, place.grad, place.activations)

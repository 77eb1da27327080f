"""How planes are striped over several paths: in proportion to what each path's disk moves. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lamina.tiers.links.probe import DiskSpeed
from lamina.tiers.tier import NvmePath

ALIKE = 0.15
"""Disks whose rates differ by less than this share count as equally fast: a short measurement tells no more."""

Device = TypeVar("Device", bound=Hashable)


def level(rates: Mapping[Device, float]) -> dict[Device, float]:
    """The rates, with those that are within ``ALIKE`` of the fastest of their kind replaced by their mean."""
    kinds: list[list[Device]] = []
    for device in sorted(rates, key=lambda device: -rates[device]):
        if kinds and rates[device] > (1 - ALIKE) * rates[kinds[-1][0]]:
            kinds[-1].append(device)
        else:
            kinds.append([device])
    return {device: sum(rates[other] for other in kind) / len(kind) for kind in kinds for device in kind}


def path_weights(devices: Sequence[Device], rates: Mapping[Device, float]) -> tuple[float, ...]:
    """Each path's weight: the rate of its device, shared by the paths on it. ``devices``: of each path."""
    return tuple(rates[device] / devices.count(device) for device in devices)


def device_shares(devices: Sequence[Device], weights: Sequence[float]) -> dict[Device, float]:
    """Share of the bytes that each device holds, all paths on it together."""
    total = sum(weights)
    shares = dict.fromkeys(devices, 0.0)
    for device, weight in zip(devices, weights, strict=True):
        shares[device] += weight / total
    return shares


def weighted(
    paths: Sequence[NvmePath], devices: Sequence[Device], speeds: Mapping[Device, DiskSpeed]
) -> tuple[tuple[NvmePath, ...], str]:
    """The paths with weights by their disks' rates when as much is read as written, and a sentence about it.

    The weights stay as they are where the caller gave different ones or a disk was not measured. The sentence is empty
    where there is nothing to weigh: all paths lie on one device.
    """
    if len(set(devices)) < 2:
        return tuple(paths), ""
    if len({path.weight for path in paths}) > 1:
        return tuple(paths), "stripes by the paths' given weights"
    missing = [path.path for path, device in zip(paths, devices, strict=True) if device not in speeds]
    if missing:
        return tuple(paths), f"even stripes, since the disk of {', '.join(missing)} was not measured"
    rates = level({device: speeds[device].mixed for device in devices})
    weights = path_weights(devices, rates)
    return tuple(
        replace(path, weight=weight) for path, weight in zip(paths, weights, strict=True)
    ), f"stripes in proportion to these rates (what differs by less than {ALIKE:.0%} counts as equal)"

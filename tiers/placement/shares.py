"""Shares of tiers: which segments, and how much of the one at the border, a plane keeps on each. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lamina.tiers.tier import Tier

from .homes import Home, SegmentSize, Shares

GRANULE = 32
"""Elements: a shard is divided at multiples of as many, as its parameters begin at them."""


def share_params(segments: Sequence[SegmentSize], homes: Mapping[str, Home], shares: Shares) -> dict[str, Home]:
    """Homes with the parameters shared out, the front of the model on the fastest tier. Whole segments: each lies where its
    middle should. Those that stay on the device tier are left out of it."""
    found = dict(homes)
    movable = [s for s in segments if not s.persistent]
    total = sum(s.shard_numel for s in movable)
    for s, begin in _placed(movable):
        found[s.name] = replace(found[s.name], param=_tier_at(shares, total, begin + s.shard_numel / 2))
    return found


def share_states(segments: Sequence[SegmentSize], homes: Mapping[str, Home], shares: Shares) -> dict[str, Home]:
    """Homes with the optimizer state shared out, the front of the model on the fastest tier.

    Whole segments, but for the one at the border between memory and NVMe: where its parameters are in memory it is divided, so
    that the share is met to within GRANULE elements.
    """
    found = dict(homes)
    trained = [s for s in segments if s.trained]
    total = sum(s.shard_numel for s in trained)
    border = _border(total, shares)
    for s, begin in _placed(trained):
        home = replace(found[s.name], kept=0)
        kept = round((border - begin) / GRANULE) * GRANULE if border is not None else 0
        if 0 < kept < s.shard_numel and home.param is not Tier.NVME:
            kept_on = _tier_at(shares, total, begin + kept / 2)
            found[s.name] = replace(home, state=Tier.NVME, kept=kept, kept_on=kept_on)
        else:
            found[s.name] = replace(home, state=_tier_at(shares, total, begin + s.shard_numel / 2))
    return found


def divided(segments: Sequence[SegmentSize], shares: Shares) -> SegmentSize | None:
    """The segment whose state the shares divide between memory and NVMe, if there is one."""
    trained = [s for s in segments if s.trained]
    border = _border(sum(s.shard_numel for s in trained), shares)
    if border is None:
        return None
    return next((s for s, begin in _placed(trained) if GRANULE <= border - begin <= s.shard_numel - GRANULE), None)


def met_shares(segments: Sequence[SegmentSize], homes: Mapping[str, Home]) -> dict[str, dict[Tier, float]]:
    """Of the parameters and of the optimizer state, the part of this rank's elements that homes put on each tier."""
    elements = {
        "parameters": {
            tier: sum(s.shard_numel for s in segments if homes[s.name].param is tier)
            for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)
        },
        "optimizer state": {
            tier: sum(homes[s.name].state_numel(s, tier) for s in segments if s.trained)
            for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)
        },
    }
    return {
        what: {tier: numel / sum(numels.values()) for tier, numel in numels.items() if numel}
        for what, numels in elements.items()
    }


def said_shares(shares: Mapping[Any, float]) -> str:
    """In words: 40.0% on host, 60.0% on nvme."""
    return ", ".join(f"{share:.1%} on {tier}" for tier, share in shares.items())


def _placed(segments: Sequence[SegmentSize]) -> Iterator[tuple[SegmentSize, int]]:
    """Each segment with the number of elements before it."""
    begin = 0
    for s in segments:
        yield s, begin
        begin += s.shard_numel


def _tier_at(shares: Shares, total: int, position: float) -> Tier:
    """The tier that holds what lies at a position among ``total`` elements."""
    end = 0.0
    for tier, share in shares:
        end += share * total
        if position < end:
            return tier
    return [tier for tier, share in shares if share][-1]


def _border(total: int, shares: Shares) -> float | None:
    """Elements in memory; None where all or none are."""
    on_nvme = dict(shares).get(Tier.NVME, 0.0)
    return total * (1 - on_nvme) if 0 < on_nvme < 1 else None

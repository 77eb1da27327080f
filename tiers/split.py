"""Splitting a shard between tiers by fraction: which elements of which plane live where. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lamina.tiers.tier import Plane, ShardSpec, Tier


@dataclass(frozen=True, kw_only=True)
class SplitPiece:
    """Elements first to first + numel of a plane, on one tier."""

    tier: Tier
    plane: Plane
    first: int
    numel: int


def split_counts(numel: int, fractions: Mapping[Tier, float], *, granule: int = 1) -> dict[Tier, int]:
    """Elements per tier, in the mapping's order: every tier but the last gets a multiple of granule, the sum is exact.

    Raises ValueError unless the fractions are 0 to 1 and add up to 1.
    """
    if granule < 1:
        raise ValueError(f"granule is {granule} elements, must be at least 1")
    total = math.fsum(fractions.values())
    if not fractions or min(fractions.values()) < 0 or abs(total - 1) > 1e-9:
        listed = ", ".join(f"{tier} {fraction}" for tier, fraction in fractions.items())
        raise ValueError(f"fractions of a split must be 0 to 1 and add up to 1, got {listed or 'none'} (sum {total})")
    counts: dict[Tier, int] = {}
    done, upto = 0, 0.0
    last = [tier for tier, fraction in fractions.items() if fraction > 0][-1]
    for tier, fraction in fractions.items():
        upto += fraction
        border = numel if tier is last else min(numel, round(upto * numel / granule) * granule)
        counts[tier] = border - done if fraction > 0 else 0
        done += counts[tier]
    return counts


def split_shard(
    shard: ShardSpec, fractions: Mapping[Plane, Mapping[Tier, float]], *, granule: int = 1024
) -> list[SplitPiece]:
    """Where each plane's elements live; pieces without elements are left out. Raises ValueError, KeyError."""
    pieces = []
    for spec in shard.planes:
        first = 0
        for tier, numel in split_counts(shard.numel, fractions[spec.plane], granule=granule).items():
            if numel:
                pieces.append(SplitPiece(tier=tier, plane=spec.plane, first=first, numel=numel))
            first += numel
    return pieces


def piece_name(shard: ShardSpec, first: int, numel: int) -> str:
    """The name of the shard that keeps these elements on one tier: with the range when it is not the whole."""
    return shard.name if numel == shard.numel else f"{shard.name}[{first}:{first + numel}]"


def shard_on(shard: ShardSpec, pieces: list[SplitPiece], tier: Tier) -> list[ShardSpec]:
    """The shards that a tier's store has to keep for a split shard.

    Planes with the same elements on the tier share one shard, named by piece_name().
    """
    ranges: dict[tuple[int, int], list[Plane]] = {}
    for piece in pieces:
        if piece.tier is tier:
            ranges.setdefault((piece.first, piece.numel), []).append(piece.plane)
    return [
        ShardSpec(
            name=piece_name(shard, first, numel),
            numel=numel,
            planes=tuple(spec for spec in shard.planes if spec.plane in planes),
            frozen=shard.frozen,
        )
        for (first, numel), planes in ranges.items()
    ]

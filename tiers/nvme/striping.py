"""Sharing bytes among paths in proportion to weight, within each path's room. Pure."""

import math
from collections.abc import Sequence

from lamina.tiers.errors import SpaceError

_PATTERN = 256  # the finest proportion between paths: 1/256


def stripe_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Chunks per stripe in one period of the pattern, in proportion to the weights (0 leaves a stripe
    out)."""
    total = math.fsum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"stripe weights are {list(weights)}: need at least one above 0, none below, all finite")
    if sum(weight > 0 for weight in weights) == 1:
        return tuple(int(weight > 0) for weight in weights)
    exact = [weight / total * _PATTERN for weight in weights]
    counts = [max(1, math.floor(share)) if share > 0 else 0 for share in exact]
    while sum(counts) != _PATTERN:  # a handful of rounds: at most one per stripe
        step = 1 if sum(counts) < _PATTERN else -1
        movable = [i for i in range(len(counts)) if exact[i] > 0 and counts[i] + step >= 1]
        counts[max(movable, key=lambda i: step * (exact[i] - counts[i]))] += step
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


def deal(counts: Sequence[int]) -> tuple[int, ...]:
    """The stripe of each chunk of one period, spread as evenly as can be."""
    period = sum(counts)
    dealt = [0] * len(counts)
    pattern = []
    for position in range(1, period + 1):
        stripe = max(range(len(counts)), key=lambda i: counts[i] * position - dealt[i] * period)
        dealt[stripe] += 1
        pattern.append(stripe)
    return tuple(pattern)


def fit_weights(
    nbytes: int, weights: Sequence[float], rooms: Sequence[int], names: Sequence[str], what: str
) -> tuple[float, ...]:
    """The weights, lowered where a path's room is below its share and raised elsewhere, in proportion.

    nbytes: bytes needed in total. rooms: bytes each path can take. Raises SpaceError with the sum.
    """
    share = [0.0] * len(weights)
    open_paths = [i for i in range(len(weights)) if weights[i] > 0]
    rest = float(nbytes)
    while open_paths:
        total = math.fsum(weights[i] for i in open_paths)
        full = [i for i in open_paths if rest * weights[i] / total > rooms[i]]
        if not full:
            for i in open_paths:
                share[i] = rest * weights[i] / total
            return tuple(share) if nbytes else tuple(weights)
        for i in full:
            share[i] = float(max(0, rooms[i]))
            rest -= share[i]
            open_paths.remove(i)
    room = sum(max(0, r) for r, weight in zip(rooms, weights, strict=True) if weight > 0)
    listed = "; ".join(f"{name}: {max(0, r):,} bytes" for name, r in zip(names, rooms, strict=True))
    raise SpaceError(
        f"{what} needs {nbytes:,} bytes, but there is room for {room:,} ({listed}): {nbytes - room:,} "
        "bytes are "
        "missing. Free space, raise tiers.nvme[].bytes, add a path to tiers.nvme, or lower tiers.generations",
        wanted=nbytes,
        free=room,
    )

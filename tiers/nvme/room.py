"""How many chunks each path gets, so that all files of a store fit, and whether files so large are allowed."""

import resource
from collections.abc import Sequence

from lamina.tiers.errors import SpaceError
from lamina.tiers.nvme.layout import CHUNK_BYTES, Layout
from lamina.tiers.nvme.striping import fit_weights, stripe_counts
from lamina.tiers.tier import ShardSpec


def disk_bytes(shards: Sequence[ShardSpec], *, generations: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """What a store of these shards takes on one path, padding and checksums included (manifest and lock left out).

    A checkpoint that is kept takes one more generation once training goes on.
    """
    main = Layout([shard for shard in shards if not shard.frozen], chunk_bytes=chunk_bytes)
    frozen = Layout([shard for shard in shards if shard.frozen], chunk_bytes=chunk_bytes)
    return generations * main.file_bytes[0] + frozen.file_bytes[0]


def plan_counts(
    groups: Sequence[tuple[Sequence[ShardSpec], int]],
    *,
    weights: Sequence[float],
    rooms: Sequence[int],
    names: Sequence[str],
    chunk_bytes: int,
    what: str,
) -> tuple[int, ...]:
    """Stripe counts for files of several kinds.

    groups: (shards of one file, how many such files). weights, rooms (bytes), names: one per path.
    Raises SpaceError with the sum when they do not fit.
    """
    total = sum(number * Layout(shards, chunk_bytes=chunk_bytes).file_bytes[0] for shards, number in groups)
    targets = list(rooms)
    # Rounding to whole chunks may overshoot a tight path: plan again with that much less room there.
    for _ in range(16):
        counts = stripe_counts(fit_weights(total, weights, targets, names, what))
        needs = [0] * len(weights)
        for shards, number in groups:
            for stripe, nbytes in enumerate(Layout(shards, counts=counts, chunk_bytes=chunk_bytes).file_bytes):
                needs[stripe] += number * nbytes
        over = [need - room for need, room in zip(needs, rooms, strict=True)]
        if max(over) <= 0:
            return counts
        targets = [target - max(0, extra) for target, extra in zip(targets, over, strict=True)]
    listed = "; ".join(f"{name}: {room:,} bytes" for name, room in zip(names, rooms, strict=True))
    raise SpaceError(
        f"{what} needs {total:,} bytes in chunks of {chunk_bytes:,}, which cannot be dealt out to the room "
        "there is "
        f"({listed}). Free space, raise tiers.nvme[].bytes or add a path to tiers.nvme",
        wanted=total,
        free=sum(rooms),
    )


def check_file_limit(nbytes: int, what: str) -> None:
    """Raise SpaceError when this process may not write a file of so many bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and nbytes > limit:
        raise SpaceError(
            f"{what} needs a file of {nbytes:,} bytes, and RLIMIT_FSIZE lets this process write files of at most "
            f"{limit:,} bytes: raise it (ulimit -f unlimited), or spread the state over more paths in tiers.nvme",
            wanted=nbytes,
            free=limit,
        )


def file_too_large(nbytes: int, what: str, error: OSError) -> SpaceError:
    """The error for EFBIG, which RLIMIT_FSIZE and file systems give alike."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return SpaceError(
        f"{what} needs a file of {nbytes:,} bytes, which is too large for its file system ({error}; RLIMIT_FSIZE is "
        f"{allowed}). Spread the state over more paths in tiers.nvme, or name a path on another file system",
        wanted=nbytes,
        free=0 if limit == resource.RLIM_INFINITY else limit,
    )

"""How much a run may put on a path, asked before anything is written."""

import os
import resource
from pathlib import Path

from lamina.bench.report import format_bytes
from lamina.tiers.memory.limits import read_memory_limits

from .points import MIB, Space

KEEP_SHARE = 0.02
"""Of the file system: left free whatever happens."""
KEEP_LEAST = 16 * MIB
MEMORY_SHARE = 0.5
"""Of free memory: what files that live in memory may take."""
BUFFER_SHARE = 0.25
"""Of free memory: what the buffers may take."""
BUFFER_MOST = 128 * MIB


class SpaceError(ValueError):
    """The files do not fit; nothing was written."""


def check_space(path: Path, wanted: int, *, in_memory: bool) -> None:
    """Raise SpaceError when `wanted` bytes do not fit in the file system of `path`, or not in one file's limit."""
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    keep = max(KEEP_LEAST, int(total * KEEP_SHARE))
    if in_memory:
        free = min(free, int(available_memory() * MEMORY_SHARE))
    if wanted + keep > free:
        fits = max(0, free - keep)
        what = "free memory that files may take there" if in_memory else "free"
        advice = f"--size {fits // MIB}MiB would fit" if fits >= MIB else "free some space, or give another path"
        raise SpaceError(
            f"{path}: {format_bytes(wanted)} of files are wanted, {format_bytes(free)} {what}, of which "
            f"{format_bytes(keep)} are left alone: {advice}"
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and wanted > limit:
        raise SpaceError(
            f"{path}: files of {format_bytes(wanted)} are wanted, RLIMIT_FSIZE allows {format_bytes(limit)}: "
            "raise it (ulimit -f unlimited) or give a smaller --size"
        )


def available_memory() -> int:
    """Bytes that this process may still take: free memory, cgroup and resource limits."""
    return read_memory_limits().allowance()[0]


def buffer_bytes(space_blocks: int, space_depth: int, asked: int | None) -> int:
    """Bytes for the buffers of one process: as asked, else enough for the largest point within a share of memory."""
    if asked is not None:
        return asked
    most = min(BUFFER_MOST, int(available_memory() * BUFFER_SHARE))
    return max(2 * MIB, min(most, 2 * space_blocks * space_depth) // MIB * MIB)


def fits(space: Space, file_bytes: int) -> None:
    """Raise SpaceError when a file is too small to hold what is in flight."""
    smallest = file_bytes // max(space.files)
    if smallest < max(space.blocks):
        raise SpaceError(
            f"--size leaves {format_bytes(smallest)} for each of {max(space.files)} files, less than the largest block of "
            f"{format_bytes(max(space.blocks))}: give a larger --size or smaller --block-sizes"
        )

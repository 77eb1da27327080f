"""The machine that this process runs on: its memory limits as the engine reads them, rates from a profile."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamina.engine.planner.machine import Machine
from lamina.engine.planner.quantity import GB, MIB, format_bytes
from lamina.tiers.memory.limits import MemoryLimits, read_memory_limits

PROCESS_BYTES = 350 * MIB
"""Resident memory of a process that has imported torch and done a first step, beyond its tensors."""

FRAGMENT_SHARE = 0.15
"""What the C library's heap keeps beyond the activations in use; measured 12 to 20 percent in plain torch."""

FRAGMENT_SHARE_OF_RANKS = 0.6
"""The same where ranks exchange through this memory: what collectives keep lies between a pass's tensors, so that the next pass
finds no whole room there. Measured 50 to 70 percent of activations and copies at two ranks, most on rank 0."""


def this_machine(
    *,
    rates: Mapping[str, Any] | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    limits: MemoryLimits | None = None,
) -> Machine:
    """This machine without a GPU.

    ``rates``: fields of ``Machine`` that were measured; unknown rates stay unknown. ``nvme_path``: a folder
    whose file system's free space is the nvme tier. The host limit is what the engine would grant now (free
    memory, cgroup, resource limits), so a plan that fits here is not refused there. Raises OSError when
    limits cannot be read.
    """
    allowed, why = (read_memory_limits() if limits is None else limits).allowance()
    machine = Machine(
        name="this machine",
        shared_memory=True,
        devices_per_host=ranks,
        host_bytes=max(allowed, 1),
        nvme_bytes=0 if nvme_path is None else free_space(nvme_path),
        process_bytes=PROCESS_BYTES,
        fragment_share=FRAGMENT_SHARE if ranks == 1 else FRAGMENT_SHARE_OF_RANKS,
        peer_bandwidth=2 * GB,
        notes=(f"host memory limited to {format_bytes(allowed)} by {why}",),
    )
    return machine.with_changes(rates or {})


def free_space(path: str | os.PathLike[str]) -> int:
    """Bytes that an ordinary user may still write to the file system of ``path`` or of its nearest existing
    parent."""
    folder = Path(path).resolve()
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize

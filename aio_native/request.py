"""Requests as plain data: what to move between which file and which memory, and how urgently."""

import enum
from dataclasses import dataclass
from typing import Any

from .files import File


class Priority(enum.IntEnum):
    """Lower is started first."""

    DEMAND = 0
    """Somebody waits for it now."""
    PREFETCH = 1
    """Somebody will want it soon."""
    WRITE_BACK = 2
    """Must be done some time."""


class Operation(enum.IntEnum):
    """Numbers of the native layer."""

    READ = 0
    WRITE = 1
    FSYNC = 2
    FDATASYNC = 3


@dataclass(frozen=True)
class Read:
    """Fill `buffer` (writable, contiguous, any alignment) from `offset` (bytes) of `file`."""

    file: File
    buffer: Any
    offset: int = 0


@dataclass(frozen=True)
class Write:
    """Write `buffer` (contiguous, any alignment) at `offset` (bytes) of `file`."""

    file: File
    buffer: Any
    offset: int = 0

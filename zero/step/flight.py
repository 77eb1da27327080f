"""A sub-group on its way through the update."""

import time
from collections import deque
from dataclasses import dataclass, field

from lamina.tiers import Block, Plane, Residency, TransferHandle

from .read_ahead import settle
from .update_job import UpdateJob


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Elements [begin, end) of the job's shard: one sub-group."""

    job: UpdateJob
    begin: int
    end: int


@dataclass(kw_only=True)
class InFlight:
    """A chunk in a staging block. Its memory is given to the next one only when ``residency`` allows to evict it."""

    chunk: Chunk
    staging: Block
    offsets: dict[Plane, int]
    handles: list[TransferHandle]
    residency: Residency
    started: float = field(default_factory=time.perf_counter)


def settle_all(*flights: deque[InFlight]) -> None:
    """Wait until no transfer touches a buffer any more; the first error is the one that is told."""
    for flight in (flight for queued in flights for flight in queued):
        settle(flight.handles)

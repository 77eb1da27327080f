"""How far ahead to fetch: just early enough for every group to arrive in time. Pure: compute times and rates come in as data.

A fetch that is asked for earlier than it must be holds memory that nothing else can use meanwhile, and stands in the link's
queue before transfers that are needed sooner. One that is asked for too late is waited for.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lamina.tiers.links.bandwidth import DISK, TO_DEVICE, BandwidthModel

from .trace import Access

HEADROOM = 2.0
"""A fetch is taken to last so many times as long as its bytes and the link's rate say: rates vary, and others use the disk."""
LEAST = 1
"""Accesses ahead that are fetched for in any case."""


@dataclass(frozen=True, kw_only=True)
class EarlyUpdate:
    """An update that runs under the passes: bytes that it reads and writes in a step, and the memory of its buffers, all of
    which may be under way when a fetch is asked for."""

    read_bytes: int = 0
    written_bytes: int = 0
    buffer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long fetches take: ``fetch_s`` of each group when it has the links for itself; ``queue_s``, what may stand before it in
    their queues; ``others_s``, how long everything else in a step keeps the busiest of them."""

    fetch_s: Sequence[float]
    queue_s: float = 0.0
    others_s: float = 0.0

    @classmethod
    def of(
        cls,
        links: BandwidthModel,
        read_bytes: Sequence[int],
        up_bytes: Sequence[int],
        update: EarlyUpdate | None = None,
    ) -> "Pace | None":
        """Of groups with so many bytes from NVMe and so many on to a device. None where a link that is used is not modelled."""
        update = update or EarlyUpdate()
        uses_disk = any(read_bytes) or update.read_bytes or update.written_bytes
        if (uses_disk and DISK not in links.names) or (any(up_bytes) and TO_DEVICE not in links.names):
            return None
        seconds = [0.0] * len(read_bytes)
        for name, amounts in ((DISK, read_bytes), (TO_DEVICE, up_bytes)):
            if any(amounts):
                link = links.link(name)
                for group, nbytes in enumerate(amounts):
                    seconds[group] += link.read.latency_s + link.read_s(nbytes) if nbytes else 0.0
        if not uses_disk:
            return cls(fetch_s=tuple(seconds))
        disk = links.link(DISK)
        return cls(
            fetch_s=tuple(seconds),
            queue_s=max(disk.read_s(update.buffer_bytes), disk.write_s(update.buffer_bytes)),
            others_s=disk.seconds(update.read_bytes, update.written_bytes),
        )


class Timetable:
    """When a step reaches each of its accesses, and when the fetch for each must be under way, if none is to be late.

    On a clock that counts seconds of compute from the step's begin. The last moment of a fetch is the access itself, or that of
    the next fetch, whichever comes first, less the time that it takes: fetches follow each other on the link. Every access is
    taken to need one, unless the one before it was to the same group: where copies are kept, this errs towards early. Where the
    link binds, since all that it does takes longer than compute, everything is due at once, as far as there is room.
    """

    def __init__(self, accesses: Sequence[Access], pace: Pace) -> None:
        self._due: list[float] = []
        clock = 0.0
        for access in accesses:
            self._due.append(clock)
            clock += access.compute_s
        self._latest = [-inf] * len(accesses)
        self._queue_s = pace.queue_s
        if sum(pace.fetch_s[access.group] for access in accesses) + pace.others_s >= clock:
            return
        moment = inf
        for at in reversed(range(len(accesses))):
            group = accesses[at].group
            again = at > 0 and accesses[at - 1].group == group
            moment = min(moment, self._due[at]) - (0.0 if again else HEADROOM * pace.fetch_s[group])
            self._latest[at] = moment

    def reach(self, position: int) -> int:
        """How many accesses after the one at ``position`` (-1: before the first) must be fetched for now, since the next
        occasion, at the access after it, would be too late."""
        following = position + 1
        if following >= len(self._due):
            return 0
        occasion = self._due[following] + self._queue_s
        return max(bisect_right(self._latest, occasion) - following, LEAST)

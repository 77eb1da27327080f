"""Writes of a transaction that are still under way, and which of them share a block with another transfer."""

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.tiers.nvme.handle import TransferHandle
from lamina.tiers.nvme.layout import ALIGN, PlaneExtent, align_up
from lamina.tiers.tier import Plane


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """nbytes at byte `offset` of a plane. frozen: of the planes that are written once."""

    frozen: bool
    extent: PlaneExtent
    offset: int
    nbytes: int
    handle: TransferHandle

    @property
    def plane(self) -> tuple[str, Plane]:
        """The plane, whatever files it is in."""
        return self.extent.shard, self.extent.plane

    def covers(self, extent: PlaneExtent, offset: int, nbytes: int) -> bool:
        """Whether it writes all of these bytes."""
        same = self.plane == (extent.shard, extent.plane)
        return same and self.offset <= offset and offset + nbytes <= self.offset + self.nbytes

    def touches(self, offset: int, nbytes: int) -> bool:
        """Whether it shares a 4096-byte block with these bytes of its plane."""
        begin, end = self.offset - self.offset % ALIGN, align_up(self.offset + self.nbytes)
        return begin < align_up(offset + nbytes) and offset - offset % ALIGN < end


class PendingWrites:
    """In the order of their start, and by plane. Not thread safe: its owner locks."""

    def __init__(self) -> None:
        self._order: dict[PendingWrite, None] = {}
        self._by_plane: dict[tuple[str, Plane], list[PendingWrite]] = {}

    def add(self, write: PendingWrite) -> None:
        """A write was started."""
        self._order[write] = None
        self._by_plane.setdefault(write.plane, []).append(write)

    def remove(self, write: PendingWrite) -> None:
        """A write is done; harmless when repeated."""
        if self._order.pop(write, self) is None:
            self._by_plane[write.plane].remove(write)

    def oldest(self) -> PendingWrite | None:
        """The one that was started first."""
        return next(iter(self._order), None)

    def all(self) -> list[PendingWrite]:
        """All of them."""
        return list(self._order)

    def touching(self, extent: PlaneExtent, offset: int, nbytes: int) -> Iterable[PendingWrite]:
        """Those that share a block with bytes of a plane: they have to be over before these are read or written."""
        writes = self._by_plane.get((extent.shard, extent.plane), ())
        return [write for write in writes if write.touches(offset, nbytes)]

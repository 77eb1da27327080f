"""Where every plane of a rank's shards lies: offsets in one file per path, striped in proportion to weight.
Pure.

A plane is a row of chunks (the unit of checksums). Chunks are dealt to the stripes by a fixed pattern, so
that any long read uses every path at once; on each stripe the chunks of a plane lie side by side, and planes
follow each other in the given order, each aligned to 4096. Behind the last plane lie the checksums of the
stripe's chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.tiers.errors import LayoutError
from lamina.tiers.nvme.striping import deal
from lamina.tiers.tier import Plane, PlaneSpec, ShardSpec

ALIGN = 4096
CHUNK_BYTES = 1 << 20
MOST_CHUNK_BYTES = 1 << 40


def align_up(value: int, align: int = ALIGN) -> int:
    """The next multiple of align."""
    return -(-value // align) * align


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a transfer: nbytes at file_offset of a stripe <-> buffer_offset of the caller's buffer."""

    stripe: int
    file_offset: int
    buffer_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlaneExtent:
    """One plane of one shard. first_chunk: number of its first chunk in the whole layout."""

    shard: str
    plane: Plane
    nbytes: int
    first_chunk: int
    num_chunks: int
    starts: tuple[int, ...]
    """file offset of its part on each stripe"""
    front: int = 0
    """bytes of the plane that lie elsewhere, before those that are here"""

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"{self.shard}/{self.plane}"


class Layout:
    """Offsets of every plane on every stripe, and of the checksums behind them.

    counts: chunks per stripe in one period (see stripe_counts); a stripe with 0 has no file. fronts: elements that come before
    those of a shard and lie elsewhere.
    """

    def __init__(
        self,
        shards: Sequence[ShardSpec],
        *,
        counts: Sequence[int] = (1,),
        chunk_bytes: int = CHUNK_BYTES,
        fronts: Mapping[str, int] | None = None,
    ) -> None:
        if chunk_bytes < ALIGN or chunk_bytes % ALIGN:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, must be a multiple of {ALIGN}")
        if not counts or min(counts) < 0 or not 1 <= sum(counts) <= 65536:
            raise ValueError(f"stripe counts are {list(counts)}: need at least one above 0")
        self.shards = tuple(shards)
        self.counts = tuple(counts)
        self.chunk_bytes = chunk_bytes
        self._fronts = fronts or {}
        self.pattern = deal(self.counts)
        self._before = self._prefix()
        self.extents: dict[tuple[str, Plane], PlaneExtent] = {}
        ends = [0] * len(self.counts)
        chunks = 0
        for shard in self.shards:
            for spec in shard.planes:
                key = (shard.name, spec.plane)
                if key in self.extents:
                    raise ValueError(f"shard {shard.name} is listed twice")
                extent = self._place(shard, spec, chunks, ends)
                self.extents[key] = extent
                chunks += extent.num_chunks
        self.num_chunks = chunks
        self.sums_offsets = tuple(ends)
        self.sums_bytes = tuple(4 * self._dealt(chunks, stripe) for stripe in range(len(self.counts)))
        self.file_bytes = tuple(
            align_up(end + sums) if count else 0
            for end, sums, count in zip(ends, self.sums_bytes, self.counts, strict=True)
        )
        self.payload_bytes = sum(extent.nbytes for extent in self.extents.values())

    def _prefix(self) -> list[list[int]]:
        """before[stripe][i]: chunks dealt to the stripe among the first i of a period."""
        table = [[0] for _ in self.counts]
        for dealt in self.pattern:
            for stripe, row in enumerate(table):
                row.append(row[-1] + (stripe == dealt))
        return table

    def _dealt(self, chunk: int, stripe: int) -> int:
        """Chunks dealt to the stripe among the first `chunk` of the layout."""
        periods, rest = divmod(chunk, len(self.pattern))
        return periods * self.counts[stripe] + self._before[stripe][rest]

    def _place(self, shard: ShardSpec, spec: PlaneSpec, first: int, ends: list[int]) -> PlaneExtent:
        nbytes = shard.numel * spec.itemsize
        num = -(-nbytes // self.chunk_bytes)
        front = self._fronts.get(shard.name, 0) * spec.itemsize
        extent = PlaneExtent(shard.name, spec.plane, nbytes, first, num, tuple(ends), front)
        last = self.pattern[(first + num - 1) % len(self.pattern)] if num else -1
        for stripe in range(len(ends)):
            part = (self._dealt(first + num, stripe) - self._dealt(first, stripe)) * self.chunk_bytes
            if stripe == last:
                part -= num * self.chunk_bytes - nbytes
            ends[stripe] = align_up(ends[stripe] + part)
        return extent

    def extent(self, shard: str, plane: Plane) -> PlaneExtent:
        """Raises KeyError naming the nearest cause."""
        try:
            return self.extents[shard, plane]
        except KeyError:
            have = [str(kind) for name, kind in self.extents if name == shard]
            said = f"it has: {', '.join(have)}" if have else "there is no such shard"
            raise KeyError(f"no plane {plane} of shard {shard}: {said}") from None

    def check_range(self, extent: PlaneExtent, offset: int, nbytes: int) -> None:
        """Raise ValueError for bytes that the plane does not have."""
        if offset < 0 or nbytes < 0 or offset + nbytes > extent.nbytes:
            asked = f"bytes {extent.front + offset:,} to {extent.front + offset + nbytes:,} asked for"
            behind = f" behind the first {extent.front:,}, which are elsewhere" if extent.front else ""
            raise ValueError(f"{extent.title}: {asked}, the plane has {extent.nbytes:,}{behind}")

    def chunk_place(self, extent: PlaneExtent, chunk: int) -> tuple[int, int]:
        """(stripe, file offset) of a chunk, counted within the plane."""
        index = extent.first_chunk + chunk
        stripe = self.pattern[index % len(self.pattern)]
        rank = self._dealt(index, stripe) - self._dealt(extent.first_chunk, stripe)
        return stripe, extent.starts[stripe] + rank * self.chunk_bytes

    def segments(self, extent: PlaneExtent, offset: int, nbytes: int) -> list[Segment]:
        """The pieces of a transfer of nbytes from byte `offset` of a plane. Raises ValueError past its
        end."""
        self.check_range(extent, offset, nbytes)
        if nbytes == 0:
            return []
        if len(self.pattern) == 1:
            stripe = self.pattern[0]
            return [Segment(stripe, extent.starts[stripe] + offset, 0, nbytes)]
        pieces: list[Segment] = []
        done = 0
        while done < nbytes:
            chunk, inside = divmod(offset + done, self.chunk_bytes)
            size = min(self.chunk_bytes - inside, nbytes - done)
            stripe, at = self.chunk_place(extent, chunk)
            last = pieces[-1] if pieces else None
            if last and last.stripe == stripe and last.file_offset + last.nbytes == at + inside:
                pieces[-1] = Segment(stripe, last.file_offset, last.buffer_offset, last.nbytes + size)
            else:
                pieces.append(Segment(stripe, at + inside, done, size))
            done += size
        return pieces


def shard_to_json(shard: ShardSpec) -> dict[str, object]:
    """Plain data."""
    planes = [[str(spec.plane), spec.itemsize] for spec in shard.planes]
    return {"name": shard.name, "numel": shard.numel, "frozen": shard.frozen, "planes": planes}


def shard_from_json(data: dict[str, object]) -> ShardSpec:
    """The inverse of shard_to_json. Raises ValueError, KeyError or TypeError on anything else."""
    name, numel, frozen, planes = data["name"], data["numel"], data["frozen"], data["planes"]
    if not (isinstance(name, str) and type(numel) is int and type(frozen) is bool and isinstance(planes, list)):
        raise ValueError(f"not a shard: {data!r}")
    specs = tuple(PlaneSpec(plane=Plane(kind), itemsize=int(size)) for kind, size in planes)
    return ShardSpec(name=name, numel=numel, planes=specs, frozen=frozen)


WAYS_ON = (
    "The state is kept: go on with the model and the budgets (tiers.device_bytes, tiers.host_bytes) that it was written "
    "under, or load a checkpoint of it, which any budgets take, under another tiers.job; remove the folder only if its state "
    "is no longer needed"
)


def require_same_shards(wanted: Sequence[ShardSpec], found: Sequence[ShardSpec], where: str) -> None:
    """Raise LayoutError naming the first difference."""
    for index, (want, have) in enumerate(zip(wanted, found, strict=False)):
        if want != have:
            raise LayoutError(
                f"{where} holds other shards than asked for: shard {index} is {_describe(have)} there, wanted "
                f"{_describe(want)}. {WAYS_ON}"
            )
    if len(wanted) != len(found):
        raise LayoutError(f"{where} holds {len(found)} shards, wanted {len(wanted)}. {WAYS_ON}")


def _describe(shard: ShardSpec) -> str:
    planes = "+".join(f"{spec.plane}:{spec.itemsize}" for spec in shard.planes)
    return f"{shard.name!r} ({shard.numel:,} elements, {planes}{', frozen' if shard.frozen else ''})"

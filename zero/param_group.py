"""A param group: what is fetched, used and released together. It is the executor's source for its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.aio_native import Priority
from lamina.tiers import Block, GenerationStore, Plane, Tier, TransferHandle

from .collectives import Ranks
from .memory import tensor_over
from .partition import round_up
from .segment import Segment

PAGE = 4096


@dataclass(kw_only=True)
class GroupFetch:
    """A group on its way into a block: this rank's shards are read or copied into their places, then all gather."""

    block: Block
    segments: Sequence[tuple[Segment, int]]
    handles: Sequence[TransferHandle]
    ranks: Ranks

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        for segment, offset in self.segments:
            if segment.param_tier is not Tier.NVME:
                begin = offset + segment.layout.shard_range(segment.rank)[0] * segment.dtype.itemsize
                self.block.view[begin : begin + segment.shard_nbytes] = segment.home_shard()
            self.ranks.all_gather(tensor_over(self.block, segment.dtype, segment.layout.numel, offset))

    def drop(self) -> None:
        for handle in self.handles:
            handle.wait()


@dataclass(kw_only=True, eq=False)
class ParamGroup:
    """Segments in order. Those that compute cannot use at home are *streamed*: fetched into one block, one after another."""

    name: str
    index: int
    segments: list[Segment]
    ranks: Ranks = field(default_factory=Ranks)
    store: GenerationStore | None = None
    bound: dict[int, Segment] = field(default_factory=dict)  # address of a bound flat layout -> its segment; shared

    @property
    def streamed(self) -> list[Segment]:
        return [segment for segment in self.segments if not segment.in_place]

    @property
    def nbytes(self) -> int:
        """Bytes of the block that a fetch needs; 0 when everything is at home in memory."""
        return sum(round_up(segment.nbytes, PAGE) for segment in self.streamed)

    def offsets(self) -> list[tuple[Segment, int]]:
        """Each streamed segment with its byte offset in the block."""
        placed, offset = [], 0
        for segment in self.streamed:
            placed.append((segment, offset))
            offset += round_up(segment.nbytes, PAGE)
        return placed

    def start(self, block: Block, priority: Priority) -> GroupFetch:
        """Begin to read this rank's NVMe-resident shards from the current generation straight into their places."""
        placed = [(segment, offset) for segment, offset in self.offsets() if segment.nbytes]
        handles = []
        for segment, offset in placed:
            if segment.param_tier is Tier.NVME:
                if self.store is None:
                    raise RuntimeError(f"{self.name} has no store to be fetched from")
                begin = offset + segment.layout.shard_range(segment.rank)[0] * segment.dtype.itemsize
                into = block.view[begin : begin + segment.shard_nbytes]
                handles.append(self.store.read(segment.name, Plane.PARAM, into, priority=priority))
        return GroupFetch(block=block, segments=placed, handles=handles, ranks=self.ranks)

    def bind(self, block: Block) -> None:
        for segment, offset in self.offsets():
            segment.bind(block, offset)
            self.bound[block.address + offset] = segment

    def unbind(self) -> None:
        for segment in self.streamed:
            if segment.flat is not None:
                self.bound.pop(segment.flat.data_ptr(), None)
            segment.unbind()

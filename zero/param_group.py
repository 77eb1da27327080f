"""A param group: what is fetched, used and released together. It is the executor's source for its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.aio_native import Priority
from lamina.tiers import Block, GenerationStore, Plane, TransferHandle

from .partition import round_up
from .segment import Segment

PAGE = 4096


@dataclass(frozen=True)
class StoreFetch:
    """Reads under way from the store into a block."""

    handles: Sequence[TransferHandle]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


@dataclass(kw_only=True, eq=False)
class ParamGroup:
    """Segments in order. Those that are not at home in memory are *streamed*: fetched into one block, one after the other."""

    name: str
    index: int
    segments: list[Segment]
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

    def start(self, block: Block, priority: Priority) -> StoreFetch | None:
        """Begin to read every streamed segment from the current generation straight into the block."""
        if self.store is None:
            raise RuntimeError(f"{self.name} has no store to be fetched from")
        handles = [
            self.store.read(segment.name, Plane.PARAM, block.view[offset : offset + segment.nbytes], priority=priority)
            for segment, offset in self.offsets()
            if segment.nbytes
        ]
        return StoreFetch(handles)

    def bind(self, block: Block) -> None:
        for segment, offset in self.offsets():
            segment.bind(block, offset)
            self.bound[block.address + offset] = segment

    def unbind(self) -> None:
        for segment in self.streamed:
            if segment.flat is not None:
                self.bound.pop(segment.flat.data_ptr(), None)
            segment.unbind()

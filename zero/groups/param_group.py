"""A param group: what is fetched, used and released together. It is the executor's source for its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.aio_native import Priority
from lamina.tiers import Block, GenerationStore, Plane, Tier, TransferHandle
from lamina.tiers.memory.gpu import Accelerator
from lamina.zero.ranks.collectives import Ranks
from lamina.zero.step.read_ahead import settle

from .fetch_buffers import FetchBuffers
from .memory import tensor_over
from .partition import round_up
from .segment import Segment

PAGE = 4096


@dataclass(kw_only=True)
class GroupFetch:
    """A group on its way into a block of memory that compute shares with the CPU: this rank's shards are read or copied
    into their places, then all ranks gather."""

    block: Block
    segments: Sequence[tuple[Segment, int]]
    handles: Sequence[TransferHandle]
    ranks: Ranks

    def advance(self) -> None:
        """Nothing to do before the group is used."""

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        for segment, offset in self.segments:
            if segment.param_tier is not Tier.NVME:
                begin = offset + segment.layout.shard_range(segment.rank)[0] * segment.dtype.itemsize
                self.block.view[begin : begin + segment.shard_nbytes] = segment.home_shard()
            self.ranks.all_gather(tensor_over(self.block, segment.dtype, segment.layout.numel, offset), segment.name)

    def drop(self) -> None:
        settle(self.handles)  # what went wrong matters to nobody


class NothingToFetch:
    """A copy that is complete as it lies."""

    def advance(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """It is there."""

    def drop(self) -> None:
        """Nothing touches the memory."""


@dataclass(kw_only=True)
class DeviceFetch:
    """A group on its way into an accelerator's memory: NVMe to page-locked host memory, up on a stream, then the gather."""

    block: Block
    segments: Sequence[tuple[Segment, int]]
    handles: Sequence[TransferHandle]
    ranks: Ranks
    device: Accelerator
    pool: FetchBuffers
    buffer: Block | None  # where this rank's NVMe-resident shards are read to, one after another
    reads: dict[int, int]  # by segment: byte offset in the buffer
    after: Any  # the block's last user has finished
    _copied: Any = None
    _launched: bool = False

    def advance(self) -> None:
        """Start the copies up as soon as the reads are done."""
        if not self._launched and all(handle.done() for handle in self.handles):
            self._launch()

    def wait(self) -> None:
        self._launch()
        self.device.compute_waits_for(self._copied)
        for segment, offset in self.segments:
            self.ranks.all_gather(self._flat(segment, offset), segment.name)

    def drop(self) -> None:
        settle(self.handles)  # what went wrong matters to nobody
        self.device.wait(self._copied)
        self._retire()

    def _launch(self) -> None:
        if self._launched:
            return
        for handle in self.handles:
            handle.wait()
        self._launched = True
        for segment, offset in self.segments:
            at = self.reads.get(id(segment))
            if at is not None and self.buffer is not None:
                view = self.buffer.view[at : at + segment.shard_nbytes]
            else:
                view = segment.home_shard()
            source = torch.frombuffer(view, dtype=segment.dtype)
            target = segment.shard_of(self._flat(segment, offset))
            self._copied = self.device.copy_up(target, source, self.after)
        self._retire()

    def _flat(self, segment: Segment, offset: int) -> torch.Tensor:
        return tensor_over(self.block, segment.dtype, segment.layout.numel, offset, device=self.device)

    def _retire(self) -> None:
        """The buffer can be used again once the copies have happened."""
        if self.buffer is not None:
            self.pool.give_back(self.buffer, self._copied)
            self.buffer = None


@dataclass(kw_only=True, eq=False)
class ParamGroup:
    """Segments in order. Those that compute cannot use at home are *streamed*: fetched into one block, one after another."""

    name: str
    index: int
    segments: list[Segment]
    ranks: Ranks = field(default_factory=Ranks)
    store: GenerationStore | None = None
    fetch_buffers: FetchBuffers | None = None  # where there is an accelerator
    bound: dict[int, Segment] = field(default_factory=dict)  # address of a bound flat layout -> its segment; shared

    @property
    def streamed(self) -> list[Segment]:
        return [segment for segment in self.segments if not segment.in_place]

    @property
    def nbytes(self) -> int:
        """Bytes of the block that a fetch needs; 0 when everything is at home in memory."""
        return sum(round_up(segment.nbytes, PAGE) for segment in self.streamed)

    @property
    def outlives_step(self) -> bool:
        """Whether its copy can be used in the next step: what is trained of it is renewed by the update."""
        return all(segment.copy_renewable or not segment.trainable for segment in self.streamed)

    def offsets(self) -> list[tuple[Segment, int]]:
        """Each streamed segment with its byte offset in the block."""
        placed, offset = [], 0
        for segment in self.streamed:
            placed.append((segment, offset))
            offset += round_up(segment.nbytes, PAGE)
        return placed

    def start(self, block: Block, priority: Priority) -> GroupFetch | DeviceFetch | None:
        """Begin to read this rank's NVMe-resident shards from the current generation on their way into the block."""
        placed = [(segment, offset) for segment, offset in self.offsets() if segment.nbytes]
        device = self.segments[0].device
        if device is not None:
            return self._start_on(device, placed, block, priority)
        handles = []
        for segment, offset in placed:
            if segment.param_tier is Tier.NVME:
                begin = offset + segment.layout.shard_range(segment.rank)[0] * segment.dtype.itemsize
                handles.append(self._read(segment, block.view[begin : begin + segment.shard_nbytes], priority))
        return GroupFetch(block=block, segments=placed, handles=handles, ranks=self.ranks)

    def _start_on(
        self, device: Accelerator, placed: Sequence[tuple[Segment, int]], block: Block, priority: Priority
    ) -> DeviceFetch | None:
        if self.fetch_buffers is None:
            raise RuntimeError(f"{self.name} has no buffers to be fetched through")
        reads, end = {}, 0
        for segment, _ in placed:
            if segment.param_tier is Tier.NVME:
                reads[id(segment)] = end
                end += round_up(segment.shard_nbytes, PAGE)
        buffer = None
        if reads:
            buffer = self.fetch_buffers.take(wait=priority is Priority.DEMAND)
            if buffer is None:
                return None
        handles = [
            self._read(segment, buffer.view[reads[id(segment)] :][: segment.shard_nbytes], priority)
            for segment, _ in placed
            if buffer is not None and id(segment) in reads
        ]
        return DeviceFetch(
            block=block,
            segments=placed,
            handles=handles,
            ranks=self.ranks,
            device=device,
            pool=self.fetch_buffers,
            buffer=buffer,
            reads=reads,
            after=device.mark(),
        )

    def _read(self, segment: Segment, into: memoryview, priority: Priority) -> TransferHandle:
        if self.store is None:
            raise RuntimeError(f"{self.name} has no store to be fetched from")
        return self.store.read(segment.name, Plane.PARAM, into, priority=priority)

    def bind(self, block: Block) -> None:
        for segment, offset in self.offsets():
            segment.bind(block, offset)
            if segment.nbytes:  # an empty one shares its address with the next
                self.bound[block.address + offset] = segment

    def keep(self, block: Block, *, renewed: bool) -> GroupFetch | NothingToFetch:
        """What is left to do before the block can be bound again: ranks that renewed their shards gather them."""
        if not renewed or self.ranks.world_size == 1:
            return NothingToFetch()
        placed = [(segment, offset) for segment, offset in self.offsets() if segment.nbytes and segment.trainable]
        return GroupFetch(block=block, segments=placed, handles=(), ranks=self.ranks)

    def unbind(self) -> None:
        for segment in self.streamed:
            if segment.flat is not None and segment.nbytes:
                self.bound.pop(segment.flat.data_ptr(), None)
            segment.unbind()

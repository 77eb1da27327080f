"""The gradients of one shard in host memory: one flat plane, allocated when the first one comes.

With one micro-batch per step a plane has the compute dtype and holds the gradients as they came; with several it is
fp32 and they are added up. Sums are taken in the order in which the micro-batches ran.
"""

from collections.abc import Callable, Set
from typing import Any

import torch

from lamina.tiers import Block, Residency, TransferHandle
from lamina.tiers.memory.gpu import Accelerator
from lamina.tiers.nvme.scratch import Scratch
from lamina.zero.groups.memory import tensor_over
from lamina.zero.groups.segment import Segment


class GradientPlane:
    """The gradients of this rank's shard of one segment.

    ``arrived`` holds the slots that have one in this window, ``fresh`` those that had one in this backward pass.
    ``residency``: of its values in host memory, the scratch file being their home; None while the window has none.
    """

    def __init__(self, segment: Segment, dtype: torch.dtype) -> None:
        self.segment = segment
        self.dtype = dtype
        self.arrived: set[int] = set()
        self.fresh: set[int] = set()
        self.edited = False
        self._block: Block | None = None
        self._give_back: Callable[[Block], None] = Block.free
        self._flat: torch.Tensor | None = None
        self._copies: list[Any] = []  # events of copies from the accelerator that may be under way
        self.load: Callable[[], None] = lambda: None  # brings a spilled plane back; see [Note: spilled gradients]
        self.residency: Residency | None = None
        self._transfer: TransferHandle | None = None  # while it is FETCHING or WRITING
        self._pieces = {index: (first, last) for index, first, last in segment.layout.pieces(segment.rank)}

    @property
    def nbytes(self) -> int:
        return self.segment.layout.shard_numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.segment.parameters)

    @property
    def final(self) -> bool:
        """Whether every parameter had its gradient in this backward pass."""
        return len(self.fresh) == len(self.segment.parameters)

    @property
    def flat(self) -> torch.Tensor | None:
        """The whole plane, gaps included, while it has values; not a copy."""
        self.load()
        return self._flat

    @property
    def present(self) -> bool:
        return self.residency is not None

    @property
    def in_memory(self) -> bool:
        return self.residency is not None and self.residency.usable

    @property
    def address(self) -> int:
        """Where the gradients are, all of them arrived."""
        self.load()
        if self._block is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        self.settle()
        return self._block.address

    def _change(self) -> None:
        self.load()
        if self.residency is not None:
            self.residency = self.residency.change()

    def attach(self, block: Block, give_back: Callable[[Block], None] = Block.free) -> None:
        """Take memory for the plane; the gaps between slots are zeroed so that a run over them changes nothing."""
        self._block, self._give_back = block, give_back
        flat = tensor_over(block, self.dtype, self.segment.layout.shard_numel)
        end = 0
        for first, last in self._pieces.values():
            flat[end:first].zero_()
            end = last
        flat[end:].zero_()
        self._flat = flat

    def piece(self, slot_index: int) -> torch.Tensor:
        """This rank's part of one parameter's gradient, 1-d, to be changed; the whole of it on one rank."""
        self._change()
        if self._flat is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        first, last = self._pieces.get(slot_index, (0, 0))
        return self._flat[first:last]

    def add(self, slot_index: int, gradient: torch.Tensor) -> None:
        """Copy a parameter's first gradient of the window, add every later one. Only where the shard is the whole."""
        into = self.piece(slot_index).view(gradient.shape)
        device = self.segment.device
        if slot_index in self.arrived:
            self.settle()
            into.add_(gradient.to("cpu"))
        else:
            if device is None:
                into.copy_(gradient)
            else:
                self._copies.append(device.copy_down(into, gradient))
            self.arrived.add(slot_index)
        self.fresh.add(slot_index)

    def add_shard(self, reduced: torch.Tensor, slots: Set[int]) -> None:
        """Add the reduced gradients of a whole shard; ``slots`` are those that any rank had a gradient for."""
        self._change()
        if self._flat is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        reduced = reduced.to("cpu")
        if self.arrived:
            self._flat.add_(reduced)
        else:
            self._flat.copy_(reduced)
        self.arrived |= slots

    def part(self) -> "GradientPlane":
        """Another plane with all that this one has, which starts an empty window without memory."""
        other = GradientPlane(self.segment, self.dtype)
        other.arrived, self.arrived = self.arrived, set()
        other.residency, self.residency = self.residency, None
        other._block, other._give_back, self._block = self._block, self._give_back, None
        other._flat, self._flat = self._flat, None
        other._copies, self._copies = self._copies, []
        self.release()
        return other

    def settle(self) -> None:
        """Wait until every gradient has come down from the accelerator."""
        for event in self._copies:
            Accelerator.wait(event)
        self._copies.clear()

    def memory(self) -> memoryview:
        """The bytes in memory, to be written or filled as they are. Raises RuntimeError where there are none."""
        if self._block is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        self.settle()
        return self._block.view[: self.nbytes]

    def start_fetch(self, scratch: Scratch, offset: int) -> None:
        """Begin to bring the values back into the memory that was attached; ``finish`` tells how it went."""
        self.residency = (self.residency or Residency.ABSENT).fetch()
        self._transfer = scratch.start_read(offset, self.memory())

    def start_write(self, scratch: Scratch, offset: int) -> None:
        """Begin to write the values to their place in the file; until ``finish`` they cannot change."""
        self.residency = (self.residency or Residency.ABSENT).write()
        self._transfer = scratch.start_write(offset, self.memory())

    def finish(self) -> None:
        """Wait for the transfer under way. Raises OSError; then the values are where they were, and only there."""
        transfer, self._transfer = self._transfer, None
        if transfer is None or self.residency is None:
            return
        try:
            transfer.wait()
        except BaseException:
            transfer.drain()
            self.residency = self.residency.fail()
            if self.residency is Residency.ABSENT:
                self._leave_memory()
            raise
        self.residency = self.residency.arrive() if self.residency is Residency.FETCHING else self.residency.written()

    @property
    def given_up_at_once(self) -> bool:
        """Whether the scratch file has the values, so that the memory can be used for others without a wait."""
        if self.residency is Residency.WRITING and self._transfer is not None:
            return self._transfer.done()
        return self.residency is Residency.RESIDENT

    def evict(self) -> None:
        """The scratch file has the values: give the memory back."""
        self.residency = (self.residency or Residency.ABSENT).evict()
        self._leave_memory()

    def _leave_memory(self) -> None:
        self._flat = None
        self._return_block()

    def _return_block(self) -> None:
        if self._block is not None:
            self._give_back(self._block)
            self._block = None

    def release(self) -> None:
        """Give the memory back and start an empty window."""
        self.settle()
        if self._transfer is not None:  # how it ends does not matter any more
            self._transfer.drain()
            self._transfer = None
        self._flat = None
        self.residency = None
        self.arrived.clear()
        self.fresh.clear()
        self.edited = False
        self._return_block()

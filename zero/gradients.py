"""Gradients of one accumulation window, in host memory: one flat plane per shard, allocated when the first one comes.

With one micro-batch per step a plane has the compute dtype and holds the gradients as they came; with several it is
fp32 and they are added up. Sums are taken in the order in which the micro-batches ran.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from lamina.tiers import Arena, Block, BudgetError
from lamina.tiers.gpu import Accelerator

from .memory import tensor_over
from .segment import Segment


class GradientPlane:
    """The gradients of this rank's shard of one segment.

    ``arrived`` holds the slots that have one in this window, ``fresh`` those that had one in this backward pass.
    """

    def __init__(self, segment: Segment, dtype: torch.dtype) -> None:
        self.segment = segment
        self.dtype = dtype
        self.arrived: set[int] = set()
        self.fresh: set[int] = set()
        self.edited = False
        self._block: Block | None = None
        self._flat: torch.Tensor | None = None
        self._copies: list[Any] = []  # events of copies from the accelerator that may be under way
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
        """The whole plane, gaps included, while it has memory; not a copy."""
        return self._flat

    @property
    def present(self) -> bool:
        return self._flat is not None

    @property
    def address(self) -> int:
        """Where the gradients are, all of them arrived."""
        if self._block is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        self.settle()
        return self._block.address

    def attach(self, block: Block) -> None:
        """Take memory for the plane; the gaps between slots are zeroed so that a run over them changes nothing."""
        self._block = block
        flat = tensor_over(block, self.dtype, self.segment.layout.shard_numel)
        end = 0
        for first, last in self._pieces.values():
            flat[end:first].zero_()
            end = last
        flat[end:].zero_()
        self._flat = flat

    def piece(self, slot_index: int) -> torch.Tensor:
        """This rank's part of one parameter's gradient, 1-d; the whole of it on one rank."""
        if self._flat is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        first, last = self._pieces.get(slot_index, (0, 0))
        return self._flat[first:last]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and past-the-last element of this rank's part of each parameter that has a gradient, in order."""
        for slot_index, (first, last) in self._pieces.items():
            if slot_index in self.arrived:
                yield first, last

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
        if self._flat is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        reduced = reduced.to("cpu")
        if self.arrived:
            self._flat.add_(reduced)
        else:
            self._flat.copy_(reduced)
        self.arrived |= slots

    def settle(self) -> None:
        """Wait until every gradient has come down from the accelerator."""
        for event in self._copies:
            Accelerator.wait(event)
        self._copies.clear()

    def release(self) -> None:
        """Give the memory back and start an empty window."""
        self.settle()
        self._flat = None
        self.arrived.clear()
        self.fresh.clear()
        self.edited = False
        if self._block is not None:
            self._block.free()
            self._block = None


class Gradients:
    """All gradient planes of a rank.

    ``wait_for_room`` is called when the arena is full; it returns False when waiting cannot help any more.
    """

    def __init__(self, segments: Sequence[Segment], arena: Arena, dtype_of: Callable[[Segment], torch.dtype]) -> None:
        self._arena = arena
        self.planes = {
            id(segment): GradientPlane(segment, dtype_of(segment)) for segment in segments if segment.trainable
        }
        self.wait_for_room: Callable[[], bool] = lambda: False

    def __getitem__(self, segment: Segment) -> GradientPlane:
        return self.planes[id(segment)]

    def add(self, segment: Segment, slot_index: int, gradient: torch.Tensor) -> GradientPlane:
        """Take over one parameter's gradient; raises BudgetError when the host tier cannot hold it."""
        plane = self.make_present(segment)
        plane.add(slot_index, gradient)
        return plane

    def make_present(self, segment: Segment) -> GradientPlane:
        """The segment's plane, with memory."""
        plane = self.planes[id(segment)]
        if not plane.present:
            plane.attach(self._room(plane))
        return plane

    def _room(self, plane: GradientPlane) -> Block:
        owner = f"gradient of {plane.segment.name}"
        while True:
            block = self._arena.try_alloc(plane.nbytes, owner)
            if block is not None:
                return block
            if not self.wait_for_room():
                break
        try:
            return self._arena.alloc(plane.nbytes, owner)
        except BudgetError as error:
            error.add_note("gradients stay in host memory until the step that uses them")
            raise

    def begin_backward(self) -> None:
        for plane in self.planes.values():
            plane.fresh.clear()

    def release_all(self) -> None:
        for plane in self.planes.values():
            plane.release()

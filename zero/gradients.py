"""Gradients of one accumulation window, in host memory: one flat plane per shard, allocated when the first one comes.

With one micro-batch per step a plane has the compute dtype and holds the gradients as they came; with several it is
fp32 and they are added up. Sums are taken in the order in which the micro-batches ran.

[Note: spilled gradients] Where the host budget cannot hold all planes, one that is not in use is written to a scratch file
and its memory given to the next; asking for its values brings it back. Only one thread asks at a time: the training thread,
or, while that waits for the updates, the update thread. What was used last is spilled first: the passes over all planes (norm,
update) go in one order, so that what stays is what a pass meets again.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch

from lamina.tiers import Arena, Block, BudgetError, Residency
from lamina.tiers.gpu import Accelerator
from lamina.tiers.nvme.scratch import Scratch

from .memory import tensor_over
from .partition import round_up
from .segment import Segment

PAGE = 4096


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
        self._change()
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

    def memory(self) -> memoryview:
        """The bytes in memory, to be written or filled as they are. Raises RuntimeError where there are none."""
        if self._block is None:
            raise RuntimeError(f"{self.segment.name} has no gradient in memory")
        self.settle()
        return self._block.view[: self.nbytes]

    def fetch(self, scratch: Scratch, offset: int) -> None:
        """Bring the values back into the memory that was attached. Raises OSError; then they are still in the file only."""
        state = (self.residency or Residency.ABSENT).fetch()
        try:
            scratch.read(offset, self.memory())
        except BaseException:
            self.residency = state.fail()
            self._leave_memory()
            raise
        self.residency = state.arrive()

    def spill(self, scratch: Scratch, offset: int) -> None:
        """Write the values to their place in the file, unless it has them, and give the memory back. Raises OSError; then
        they are still here."""
        state = self.residency or Residency.ABSENT
        if state is Residency.DIRTY:
            self.residency = state.write()
            try:
                scratch.write(offset, self.memory())
            except BaseException:
                self.residency = self.residency.fail()
                raise
            state = self.residency.written()
        self.residency = state.evict()
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
        self._flat = None
        self.residency = None
        self.arrived.clear()
        self.fresh.clear()
        self.edited = False
        self._return_block()


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
        self._own: dict[int, Block] = {}
        self._shared: list[Block] = []
        self._scratch: Scratch | None = None
        self._places: dict[int, int] = {}
        self._used: dict[int, GradientPlane] = {}  # in the order of their last use

    def reserve(self, transient: Set[int]) -> None:
        """Take the memory that the placement planned, so that later nothing else can lie in its way.

        ``transient``: ids of segments whose gradient is given up as soon as it was used. Blocks among them share two
        places, everything else has one of its own. Not for planes that may be spilled. Called again, between steps, it gives
        back what it took before.
        """
        for block in (*self._own.values(), *self._shared):
            block.free()
        own, passing = self._places_for(transient)
        self._own = {
            key: self._arena.alloc(nbytes, f"gradient of {self.planes[key].segment.name}")
            for key, nbytes in own.items()
        }
        self._shared = [self._arena.alloc(nbytes, "gradients in passing") for nbytes in passing]

    def _places_for(self, transient: Set[int]) -> tuple[dict[int, int], list[int]]:
        """Bytes of each plane that gets a place of its own, and of the places that the others share."""
        own, passing = {}, []
        for key, plane in self.planes.items():
            if plane.nbytes and key in transient and plane.segment.block:
                passing.append(plane.nbytes)
            elif plane.nbytes:
                own[key] = plane.nbytes
        return own, [max(passing)] * min(2, len(passing)) if passing else []

    def reserved(self) -> list[Block]:
        """The blocks that are set aside."""
        return [*self._own.values(), *self._shared]

    def sizes_for(self, transient: Set[int]) -> list[int]:
        """Bytes of the blocks that ``reserve`` would take, in its order."""
        own, passing = self._places_for(transient)
        return [*own.values(), *passing]

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
            self._give_memory(plane)
            plane.residency = Residency.ABSENT.create()
        plane.load()
        return plane

    def spill_to(self, scratch: Scratch) -> None:
        """Use a scratch file from now on; it has room for all planes, each from a multiple of 4096 bytes on."""
        self._scratch = scratch
        offset = 0
        for key, plane in self.planes.items():
            self._places[key] = offset
            offset += round_up(plane.nbytes, PAGE)
            plane.load = partial(self._load, plane)

    def _load(self, plane: GradientPlane) -> None:
        """Note the use; bring the plane back when it was spilled."""
        key = id(plane.segment)
        if plane.residency is Residency.ABSENT and self._scratch is not None:
            self._give_memory(plane)
            plane.fetch(self._scratch, self._places[key])
        self._used.pop(key, None)
        self._used[key] = plane

    def _spill_one(self, wanted: GradientPlane) -> bool:
        """Give the memory of one plane to another; False when there is none to take it from."""
        if self._scratch is None:
            return False
        others = [plane for plane in self._used.values() if plane.in_memory and plane is not wanted and plane.nbytes]
        if not others:
            return False
        complete = [plane for plane in others if plane.final]
        victim = (complete or others)[-1]
        victim.spill(self._scratch, self._places[id(victim.segment)])
        return True

    def _give_memory(self, plane: GradientPlane) -> None:
        own = self._own.get(id(plane.segment))
        if own is not None:
            plane.attach(own, lambda _: None)
            return
        owner = f"gradient of {plane.segment.name}"
        while True:
            if self._shared:
                plane.attach(self._shared.pop(), self._shared.append)
                return
            block = self._arena.try_alloc(plane.nbytes, owner)
            if block is not None:
                plane.attach(block)
                return
            if self._scratch is not None:
                if not self._spill_one(plane):
                    break
            elif not self.wait_for_room():
                break
        try:
            plane.attach(self._arena.alloc(plane.nbytes, owner))
        except BudgetError as error:
            error.add_note("gradients stay in host memory until the step that uses them")
            raise

    def begin_backward(self) -> None:
        for plane in self.planes.values():
            plane.fresh.clear()

    def release_all(self) -> None:
        for plane in self.planes.values():
            plane.release()

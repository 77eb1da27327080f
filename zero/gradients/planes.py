"""All gradient planes of a rank, and the host memory that they take turns in."""

from collections.abc import Callable, Sequence, Set

import torch

from lamina.tiers import Arena, Block, BudgetError, Residency
from lamina.tiers.nvme.scratch import Scratch
from lamina.zero.groups.segment import Segment

from .plane import GradientPlane
from .spill import Spill


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
        self._spill: Spill | None = None  # see [Note: spilled gradients]
        self._held: dict[int, GradientPlane] = {}

    def reserve(self, transient: Set[int]) -> None:
        """Take the memory that the placement planned, so that later nothing else can lie in its way.

        ``transient``: ids of segments whose gradient is given up as soon as it was used. Blocks among them share two
        places, everything else has one of its own. Not for planes that may be spilled. Called again, between steps, it gives
        back what it took before.
        """
        self.give_up_places()
        own, passing = self._places_for(transient)
        self._own = {
            key: self._arena.alloc(nbytes, f"gradient of {self.planes[key].segment.name}")
            for key, nbytes in own.items()
        }
        self._shared = [self._arena.alloc(nbytes, "gradients in passing") for nbytes in passing]

    def give_up_places(self) -> None:
        """Give back what was reserved. Between steps."""
        for block in self.reserved():
            block.free()
        self._own, self._shared = {}, []

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
        if self._spill is not None and plane.final:
            self._spill.write_behind(plane)
        return plane

    def add_shard(self, segment: Segment, reduced: torch.Tensor) -> None:
        """Take over the reduced gradients of all parameters of a shard."""
        plane = self.make_present(segment)
        plane.add_shard(reduced, set(range(len(segment.parameters))))
        if self._spill is not None:
            self._spill.write_behind(plane)

    def make_present(self, segment: Segment) -> GradientPlane:
        """The segment's plane, with memory."""
        plane = self.planes[id(segment)]
        if not plane.present:
            self._give_memory(plane)
            plane.residency = Residency.ABSENT.create()
        plane.load()
        return plane

    def hold(self, segment: Segment) -> GradientPlane:
        """A segment's gradients, to be used after their window is over, and released then; it starts an empty one."""
        held = self._held[id(segment)] = self.planes[id(segment)].part()
        return held

    def spill_to(self, scratch: Scratch) -> None:
        """Use a scratch file from now on; it has room for all planes, each from a multiple of 4096 bytes on."""
        self._spill = Spill(self.planes, scratch, give_memory=self._give_memory, try_memory=self._try_memory)

    def _try_memory(self, plane: GradientPlane) -> Block | None:
        return self._arena.try_alloc(plane.nbytes, f"gradient of {plane.segment.name}")

    def _give_memory(self, plane: GradientPlane) -> None:
        held = self._held.pop(id(plane.segment), None)
        while held is not None and held.present and self.wait_for_room():
            pass
        own = self._own.get(id(plane.segment))
        if own is not None:
            plane.attach(own, lambda _: None)
            return
        owner = f"gradient of {plane.segment.name}"
        while True:
            if self._shared:
                plane.attach(self._shared.pop(), self._shared.append)
                return
            block = self._try_memory(plane)
            if block is not None:
                plane.attach(block)
                return
            if self._spill is not None:
                if not self._spill.give_up_one(plane):
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

"""Gradient planes that go to a scratch file and come back.

[Note: spilled gradients] Where the host budget cannot hold all planes, one that is not in use is written to a scratch file
and its memory given to the next; asking for its values brings it back. Both happen ahead of need where they can: a plane
whose gradients of a backward pass have all come is written while the next fills, and while a pass over the planes works on
one, the next in its direction is read. What was used last is given up first, of what is written already: the passes over
all planes (norm, update) go in one order, so that what stays is what a pass meets again. Only one thread asks at a time: the
training thread or, while that waits for the updates, the update thread.
"""

from collections.abc import Callable, Mapping
from functools import partial

from lamina.tiers import Block, Residency
from lamina.tiers.nvme.scratch import Scratch
from lamina.zero.groups.partition import round_up

from .plane import GradientPlane

PAGE = 4096


class Spill:
    """``planes`` in the order of passes; ``give_memory`` waits for memory for one, ``try_memory`` does not."""

    def __init__(
        self,
        planes: Mapping[int, GradientPlane],
        scratch: Scratch,
        *,
        give_memory: Callable[[GradientPlane], None],
        try_memory: Callable[[GradientPlane], Block | None],
    ) -> None:
        self._scratch = scratch
        self._give_memory = give_memory
        self._try_memory = try_memory
        self._order = list(planes.values())
        self._places: dict[int, int] = {}
        self._used: dict[int, GradientPlane] = {}  # in the order of their last use
        self._last = 0
        offset = 0
        for index, plane in enumerate(self._order):
            self._places[id(plane)] = offset
            offset += round_up(plane.nbytes, PAGE)
            plane.load = partial(self._load, plane, index)

    def write_behind(self, plane: GradientPlane) -> None:
        """The plane is not needed for now: begin to write it when there is no memory for another one like it."""
        if plane.residency is not Residency.DIRTY or not plane.nbytes:
            return
        spare = self._try_memory(plane)
        if spare is not None:
            spare.free()
            return
        plane.start_write(self._scratch, self._places[id(plane)])

    def give_up_one(self, wanted: GradientPlane) -> bool:
        """Give one plane's memory back, for another; False when there is none to take it from."""
        others = [plane for plane in self._used.values() if plane.in_memory and plane is not wanted and plane.nbytes]
        if not others:
            return False
        idle = [plane for plane in others if plane.final] or others
        victim = ([plane for plane in idle if plane.given_up_at_once] or idle)[-1]
        if victim.residency is Residency.DIRTY:
            victim.start_write(self._scratch, self._places[id(victim)])
        victim.finish()
        victim.evict()
        return True

    def _load(self, plane: GradientPlane, index: int) -> None:
        """Note the use; bring the plane back when it was spilled, and begin with the next one."""
        plane.finish()
        if plane.residency is Residency.ABSENT:
            self._give_memory(plane)
            plane.start_fetch(self._scratch, self._places[id(plane)])
            plane.finish()
        self._used.pop(id(plane), None)
        self._used[id(plane)] = plane
        if index != self._last:
            self._read_ahead(plane, index + (1 if index > self._last else -1))
            self._last = index

    def _read_ahead(self, current: GradientPlane, index: int) -> None:
        """Begin to read a plane when there is memory for it, or some that is only a copy of what is written."""
        if not 0 <= index < len(self._order):
            return
        plane = self._order[index]
        if plane.residency is not Residency.ABSENT or not plane.nbytes:
            return
        block = self._try_memory(plane)
        if block is None:
            copies = [other for other in self._used.values() if other is not current and other.given_up_at_once]
            if not copies:
                return
            copies[-1].finish()
            copies[-1].evict()
            block = self._try_memory(plane)
            if block is None:
                return
        plane.attach(block)
        plane.start_fetch(self._scratch, self._places[id(plane)])

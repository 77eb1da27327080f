"""Memory for saved inputs: set aside, what the placement leaves of the host tier, or without a budget as much as it takes."""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack

from lamina.tiers import Arena, Block, BudgetError, Tier
from lamina.tiers.memory.gpu import Accelerator
from lamina.tiers.placement.homes import page_up

OWNER = "saved inputs"
GROWTH_BYTES = 64 << 20


class _LentMemory:
    """A block of an arena as the memory of a smaller one."""

    page_kind = "lent"

    def __init__(self, block: Block) -> None:
        self.address = block.address
        self._block = block

    def close(self) -> None:
        self._block.free()


def arena_within(arena: Arena, nbytes: int) -> Arena:
    """Part of an arena, set aside. Raises BudgetError when it is not free."""
    return Arena(arena.tier, nbytes, memory=_LentMemory(arena.alloc(nbytes, OWNER)))


class Room:
    """Host memory for saved inputs."""

    def __init__(self, arenas: Sequence[Arena], accelerator: Accelerator | None, *, grows: bool = False) -> None:
        """``arenas`` stay their owners' to close. ``grows``: there is no budget."""
        self._arenas = list(arenas)
        self._grows = grows
        self._accelerator = accelerator
        self._closing = ExitStack()

    def try_take(self, nbytes: int) -> Block | None:
        for arena in self._arenas:
            block = arena.try_alloc(nbytes, OWNER)
            if block is not None:
                return block
        if not self._grows:
            return None
        arena = Arena(Tier.HOST, max(nbytes, GROWTH_BYTES))
        self._closing.callback(arena.close)
        if self._accelerator is not None:
            self._closing.enter_context(self._accelerator.page_locked(arena))
        self._arenas.append(arena)
        return arena.alloc(nbytes, OWNER)

    @property
    def free_bytes(self) -> int:
        return sum(arena.free_bytes for arena in self._arenas)

    def refusal(self, nbytes: int, remedy: str) -> BudgetError:
        free, budget = self.free_bytes, sum(arena.nbytes for arena in self._arenas)
        return BudgetError(
            f"{OWNER}: an input of {nbytes:,} bytes wants host memory, of which {free:,} of {budget:,} are free. {remedy}",
            owner=OWNER,
            wanted=nbytes,
            free=free,
            budget=budget,
            largest=max((arena.largest_hole for arena in self._arenas), default=0),
        )

    def close(self) -> None:
        self._closing.close()
        self._arenas.clear()


class Demand:
    """Bytes, in whole pages, that inputs take at a time. ``most``: so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def count(self, kept: object, nbytes: int) -> None:
        """``kept`` takes so much until it dies."""
        size = page_up(nbytes)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self._end, size).atexit = False

    def _end(self, size: int) -> None:
        self.now -= size

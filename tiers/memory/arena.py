"""Arenas: one page-aligned reservation per tier, cut into blocks under an exact byte budget."""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.aio_native import AlignedBuffer
from lamina.tiers.errors import BudgetError
from lamina.tiers.memory.freelist import FreeList
from lamina.tiers.memory.limits import read_memory_limits
from lamina.tiers.tier import Tier


@dataclass(frozen=True, kw_only=True)
class ArenaReport:
    """What an arena holds. All sizes in bytes."""

    tier: Tier
    nbytes: int
    used: int
    peak: int
    largest_hole: int
    page_kind: str
    """"hugetlb", "thp" or "small": what the reservation is backed by"""
    by_owner: dict[str, int]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "tier": str(self.tier),
            "nbytes": self.nbytes,
            "used": self.used,
            "peak": self.peak,
            "largest_hole": self.largest_hole,
            "page_kind": self.page_kind,
            "by_owner": dict(self.by_owner),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.tier} arena: {self.used:,} of {self.nbytes:,} bytes used, peak {self.peak:,}, "
            f"largest hole {self.largest_hole:,}, {self.page_kind} pages"
        ]
        lines += [f"  {size:>16,}  {owner}" for owner, size in self.by_owner.items()]
        return "\n".join(lines)


def _cannot_reserve(tier: Tier, nbytes: int, error: OSError) -> BudgetError:
    allowed, why = read_memory_limits().allowance()
    key = f"tiers.{tier}_bytes"
    return BudgetError(
        f"{tier} arena: cannot reserve {nbytes:,} bytes: {error.strerror}. By {why}, {allowed:,} can be had: lower {key}",
        owner=key,
        wanted=nbytes,
        free=allowed,
        budget=nbytes,
        largest=allowed,
    )


class Memory(Protocol):
    """What an arena can be cut from: host memory, or a device's."""

    address: int

    @property
    def page_kind(self) -> str: ...

    def close(self) -> None: ...


class _Reservation:
    """The memory and its books; outlives the Arena for as long as a block or a view of one is held."""

    def __init__(self, tier: Tier, nbytes: int, huge_pages: bool | None, memory: Memory | None) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.buffer = memory
        try:
            if memory is None and nbytes:
                self.buffer = AlignedBuffer(nbytes, huge_pages=huge_pages)
        except OSError as error:
            raise _cannot_reserve(tier, nbytes, error) from error
        self.address = self.buffer.address if self.buffer else 0
        self.lock = threading.Lock()
        self.holes = FreeList(nbytes)
        self.live: dict[int, tuple[int, str]] = {}
        # [Note: freed blocks] A finalizer runs wherever the last reference dies, also inside alloc() on the
        # same thread with the lock held. It therefore only appends here (atomic); whoever holds the lock
        # drains.
        self.freed: deque[int] = deque()
        self.peak = 0
        self.closed = False

    def drain(self) -> None:
        """Book the blocks that died. The caller holds the lock."""
        while self.freed:
            offset = self.freed.popleft()
            size, _ = self.live.pop(offset)
            self.holes.give(offset, size)
        if self.closed and not self.live and self.buffer is not None:
            self.buffer.close()
            self.buffer = None

    def died(self, offset: int) -> None:
        """Finalizer of a block's storage."""
        self.freed.append(offset)
        # After close() nobody will come and drain; see [Note: freed blocks] for why the lock is only tried.
        if self.closed and self.lock.acquire(blocking=False):
            try:
                self.drain()
            finally:
                self.lock.release()


class Block:
    """Bytes of an arena. They go back when free() was called (or the Block died) and the last memoryview,
    array or tensor over `view` is gone, whichever comes last."""

    __slots__ = ("__weakref__", "_storage", "address", "nbytes", "owner")

    def __init__(self, storage: ctypes.Array[ctypes.c_char], address: int, owner: str) -> None:
        self._storage: ctypes.Array[ctypes.c_char] | None = storage
        self.address = address
        self.nbytes = len(storage)
        self.owner = owner

    @property
    def view(self) -> memoryview:
        """Writable bytes, format "B"; keeps the storage alive. Raises ValueError after free()."""
        if self._storage is None:
            raise ValueError(f"block of {self.owner} ({self.nbytes:,} bytes) was freed")
        return memoryview(self._storage).cast("B")

    @property
    def storage(self) -> object:
        """What keeps the bytes from being given out again for as long as it is held."""
        return self._storage

    @property
    def freed(self) -> bool:
        """Whether free() was called."""
        return self._storage is None

    def free(self) -> None:
        """Drop this reference to the storage; harmless when repeated."""
        self._storage = None

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"Block({self.owner!r}, {self.nbytes:,} bytes at {self.address:#x}{state})"


class Trial:
    """An arena's holes at one moment: blocks are given back and taken on paper, as the arena itself would do it."""

    def __init__(self, holes: FreeList, address: int) -> None:
        self._holes = holes
        self._address = address

    def give(self, block: Block) -> None:
        """As if the block had been freed."""
        if block.nbytes:
            self._holes.give(block.address - self._address, block.nbytes)

    def take(self, sizes: Sequence[int], *, align: int = 4096) -> bool:
        """As if blocks of these sizes had been allocated, in this order; False, and nothing taken, when one does not fit."""
        holes = self._holes.copy()
        fits = all(holes.take(nbytes, align, self._address) is not None for nbytes in sizes if nbytes)
        if fits:
            self._holes = holes
        return fits


class Arena:
    """One huge-page backed reservation with a byte budget that holds.

    nbytes: budget in bytes; pages are touched when they are first used, so an unused budget costs nothing.
    huge_pages: None tries, True insists, False forbids. memory: `nbytes` to use instead of new host memory; the views of
    blocks in a device's memory cannot be read from the CPU. Thread safe.
    """

    def __init__(
        self, tier: Tier, nbytes: int, *, huge_pages: bool | None = None, memory: Memory | None = None
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"{tier} arena: budget is {nbytes} bytes, must not be negative")
        self.tier = tier
        self.nbytes = nbytes
        self._memory = _Reservation(tier, nbytes, huge_pages, memory)
        # Asked once: the kernel's account of it is slow to read, and reports are made often.
        self.address = self._memory.address
        self.page_kind = self._memory.buffer.page_kind if self._memory.buffer else "small"

    def alloc(self, nbytes: int, owner: str, *, align: int = 4096) -> Block:
        """A block of exactly nbytes. Raises BudgetError, with who holds what, when it does not fit."""
        block = self.try_alloc(nbytes, owner, align=align)
        if block is None:
            raise self._refusal(nbytes, owner)
        return block

    def try_alloc(self, nbytes: int, owner: str, *, align: int = 4096, last: bool = False) -> Block | None:
        """Like alloc(), but None when it does not fit. ``last``: at the end of the last hole instead of in the smallest one."""
        if nbytes < 0:
            raise ValueError(f"{owner}: wanted {nbytes} bytes, must not be negative")
        if align < 1 or align & (align - 1):
            raise ValueError(f"{owner}: align is {align}, must be a power of two")
        memory = self._memory
        if nbytes == 0:
            return Block((ctypes.c_char * 0)(), memory.address, owner)
        with memory.lock:
            if memory.closed:
                raise ValueError(f"{self.tier} arena is closed: {owner} cannot have {nbytes:,} bytes")
            memory.drain()
            take = memory.holes.take_last if last else memory.holes.take
            offset = take(nbytes, align, memory.address)
            if offset is None:
                return None
            memory.live[offset] = (nbytes, owner)
            memory.peak = max(memory.peak, self.nbytes - memory.holes.free_bytes)
        storage = (ctypes.c_char * nbytes).from_address(memory.address + offset)
        weakref.finalize(storage, memory.died, offset).atexit = False
        return Block(storage, memory.address + offset, owner)

    def trial(self) -> "Trial":
        """The holes as they are now, to try out what would fit."""
        memory = self._memory
        with memory.lock:
            memory.drain()
            return Trial(memory.holes.copy(), memory.address)

    @property
    def used(self) -> int:
        """Bytes in blocks that are still held."""
        return self.nbytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        with self._memory.lock:
            self._memory.drain()
            return self._memory.holes.free_bytes

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        with self._memory.lock:
            self._memory.drain()
            return self._memory.holes.largest

    @property
    def peak(self) -> int:
        """The most bytes that were in use at once."""
        return self._memory.peak

    def report(self) -> ArenaReport:
        """Used, peak and by owner (largest first), all in bytes."""
        memory = self._memory
        with memory.lock:
            memory.drain()
            by_owner: dict[str, int] = {}
            for size, owner in memory.live.values():
                by_owner[owner] = by_owner.get(owner, 0) + size
            return ArenaReport(
                tier=self.tier,
                nbytes=self.nbytes,
                used=self.nbytes - memory.holes.free_bytes,
                peak=memory.peak,
                largest_hole=memory.holes.largest,
                page_kind=self.page_kind,
                by_owner=dict(sorted(by_owner.items(), key=lambda item: (-item[1], item[0]))),
            )

    def close(self) -> None:
        """No more blocks. The reservation is unmapped at once, or when the last view of a block dies."""
        with self._memory.lock:
            self._memory.closed = True
            self._memory.drain()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refusal(self, wanted: int, owner: str) -> BudgetError:
        report = self.report()
        free = report.nbytes - report.used
        why = "the budget is full" if wanted > free else "no hole is large enough"
        holders = ", ".join(f"{name} {size:,}" for name, size in list(report.by_owner.items())[:8]) or "nobody"
        more = len(report.by_owner) - 8
        return BudgetError(
            f"{self.tier} arena: {owner} wants {wanted:,} bytes, but {why}: budget {report.nbytes:,}, "
            f"used {report.used:,}, free {free:,}, largest hole {report.largest_hole:,}. Held by: {holders}"
            f"{f' and {more} more' if more > 0 else ''}. Raise tiers.{self.tier}_bytes or move more to a "
            "slower tier",
            owner=owner,
            wanted=wanted,
            free=free,
            budget=report.nbytes,
            largest=report.largest_hole,
        )

"""Carries groups into the device tier and out again, as the scheduler decides, and measures what it cost.

Mechanism only: which group to fetch or evict is decided in scheduler.py. The executor is used from the thread that
runs forward and backward; transfers run in the native layer.

[Note: renewed copies] An update writes the new parameters into the fetched copy of their group, too, where there is one that
nothing computes with any more. Until the update is committed such a copy is ahead of its home: it is DIRTY, and a use of its
group drops it and fetches what still counts. With the commit it counts like its home and is kept for the next step, which
need not read it. Kept copies lie there unbound, so that nobody can change one behind its home's back.

[Note: evicting alike] Ranks gather what they fetch, so all must fetch and evict the same groups. When memory comes back is a
matter of time, though: a collective's work object holds its tensors a little longer than the collective takes. With
``alike`` memory that was let go of is therefore waited for before it is counted.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from lamina.aio_native import Priority
from lamina.tiers.errors import BudgetError
from lamina.tiers.memory.arena import Arena, Block

from .lookahead import Pace, Timetable
from .plan import Verb
from .residency import Residency
from .scheduler import DeviceState, Scheduler
from .spans import Spans
from .trace import TraceCursor
from .window import tile_bytes

PATIENCE_S = 0.5
"""How long memory of evicted groups is waited for before a demand is refused."""


class Transfer(Protocol):
    """A fetch under way; owns what it fills until ``wait`` or ``drop`` returns."""

    def wait(self) -> None:
        """Return once the group can be used. Between ranks this may be a collective, made in the order of use."""

    def advance(self) -> None:
        """Do what can be done now without waiting: called now and then while the fetch is under way."""

    def drop(self) -> None:
        """Return once nothing touches the memory any more; the group is not going to be used."""


class Source(Protocol):
    """A group's home, from which it can be fetched any number of times."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def outlives_step(self) -> bool:
        """Whether a fetched copy can be used in the next step: nothing changes it, or the update renews it."""

    def start(self, block: Block, priority: Priority) -> Transfer | None:
        """Begin filling ``block``; None when that cannot begin now (no staging memory) and it was no demand."""

    def bind(self, block: Block) -> None:
        """The block is filled: let the parameters point into it."""

    def keep(self, block: Block, *, renewed: bool) -> Transfer:
        """What is left to do before a block that was filled once can be bound again; nothing is read from home.
        ``renewed``: this rank's part of it has newer values than the other ranks'."""

    def unbind(self) -> None:
        """Let go of every reference into the block."""


@dataclass(kw_only=True)
class ExecutorCounters:
    """What has happened since the counters were last taken."""

    stalled_s: float = 0.0
    fetches: int = 0
    demand_fetches: int = 0
    fetched_bytes: int = 0
    kept_bytes: int = 0
    """Bytes of copies that were kept from the step before and used."""
    evictions: int = 0
    deviations: int = 0


@dataclass(kw_only=True)
class _Seat:
    """One group's place in the device tier."""

    residency: Residency = Residency.ABSENT
    block: Block | None = None
    transfer: Transfer | None = None  # under way, or left to do before a kept copy is used
    started: float = 0.0
    pins: int = 0

    @property
    def usable(self) -> bool:
        """Bound, with the values that count."""
        return self.residency is Residency.RESIDENT and self.transfer is None

    @property
    def kept(self) -> bool:
        """Filled in an earlier step and not used since."""
        return self.residency is Residency.RESIDENT and self.transfer is not None


@dataclass(kw_only=True)
class Executor:
    """Keeps groups resident while they are used, and where there is room until they are used again; prefetches along the trace.

    ``acquire`` returns once the group's parameters are usable. ``pin`` keeps it from being evicted until the same
    number of ``unpin``. The group that was acquired last is never evicted either.

    ``alike``: see [Note: evicting alike]. ``settle_changes`` is called before a copy is evicted that an update may be writing
    into; there it waits for the update, so that the memory comes back at once.

    ``pace`` is asked once a step how long fetches take; without it, or where it gives None, they are issued as early as the
    window allows, as far as ``lookahead``.
    """

    arena: Arena
    sources: Sequence[Source]
    lookahead: int
    spans: Spans
    trace: TraceCursor = field(default_factory=TraceCursor)
    counters: ExecutorCounters = field(default_factory=ExecutorCounters)
    pace: Callable[[], Pace | None] = lambda: None
    settle_changes: Callable[[], None] = lambda: None
    alike: bool = False

    def __post_init__(self) -> None:
        self._seats = [_Seat() for _ in self.sources]
        self._timetable: Timetable | None = None
        self._let_go: list[weakref.ref[object]] = []  # what is, or was, behind blocks that were given back
        self.homes_changed()
        self._current = -1
        self._compute_since = time.perf_counter()

    # -- use ---------------------------------------------------------------------------------------------------

    def acquire(self, index: int) -> None:
        """Make the group usable, waiting for it if need be; then prefetch what comes next."""
        seat = self._seats[index]
        if index == self._current and seat.usable:
            return
        now = time.perf_counter()
        self.trace.observe(index, now - self._compute_since)
        self._current = index
        if not seat.usable:
            self._make_resident(index)
        self._prefetch()
        for other in self._seats:
            if other.transfer is not None:
                other.transfer.advance()
        self._compute_since = time.perf_counter()

    def pin(self, index: int) -> None:
        self.acquire(index)
        self._seats[index].pins += 1

    def unpin(self, index: int) -> None:
        seat = self._seats[index]
        if seat.pins == 0:
            raise RuntimeError(f"{self.sources[index].name} is released more often than it was used")
        seat.pins -= 1

    def unpin_all(self) -> None:
        """Nothing computes any more. A pass that was cut by Ctrl-C has left pins: torch then calls none of the hooks that take
        them off."""
        for seat in self._seats:
            seat.pins = 0

    # -- the life of a step --------------------------------------------------------------------------------------

    def change(self, index: int) -> bool:
        """An update is about to write into the group's copy. False where it must not: there is none, or it is in use."""
        seat = self._seats[index]
        if seat.pins or not (seat.usable or seat.residency is Residency.DIRTY):
            return False
        seat.residency = seat.residency.change()
        return True

    def changes_dropped(self) -> None:
        """The update is not going to count: what it wrote into copies is dropped."""
        for index, seat in enumerate(self._seats):
            if seat.residency is Residency.DIRTY:
                self._evict(index)

    def committed(self, changed: AbstractSet[int], renewed: AbstractSet[int]) -> None:
        """The homes of the ``changed`` groups hold newer values. The copies of those ``renewed`` have them, too, and are kept;
        other copies of them are dropped. Raises RuntimeError for one that is in use."""
        for index, seat in enumerate(self._seats):
            if index in renewed and seat.residency is Residency.DIRTY:
                self._keep(index, renewed=True)
            elif index in changed or seat.residency is Residency.DIRTY:
                self._remove(index)

    def invalidate(self) -> None:
        """Drop every fetched copy: the homes hold newer values. Waits for transfers under way."""
        for index in range(len(self._seats)):
            self._remove(index)
        self._current = -1

    def end_step(self) -> None:
        """Close the step's trace, keep the copies that still count, and begin to fetch for the next step."""
        for index, seat in enumerate(self._seats):
            if seat.usable and not seat.pins:
                self._keep(index, renewed=False)
        self._current = -1
        self.counters.deviations += self.trace.deviant
        self.trace.end_step()
        pace = self.pace()
        self._timetable = Timetable(self.trace.recorded, pace) if pace is not None else None
        self._prefetch()
        self._compute_since = time.perf_counter()

    def homes_changed(self) -> None:
        """Some groups are fetched from now on that were used at home before, or the other way round."""
        sizes = [source.nbytes for source in self.sources]
        self._scheduler = Scheduler(sizes=sizes, lookahead=self.lookahead)
        self._tile = tile_bytes(sizes)
        self.trace.carry(index for index, source in enumerate(self.sources) if source.outlives_step)

    def forget_trace(self) -> None:
        """Record the next step anew."""
        self.trace = TraceCursor()
        self._timetable = None
        self.homes_changed()

    def take_counters(self) -> ExecutorCounters:
        taken, self.counters = self.counters, ExecutorCounters()
        return taken

    def close(self) -> None:
        self.unpin_all()
        self.invalidate()

    # -- mechanism ---------------------------------------------------------------------------------------------------

    def give_back(self, block: Block) -> None:
        """Free a block of the device tier."""
        if self.alike and not block.freed:
            self._let_go.append(weakref.ref(block.storage))
        block.free()

    def _settle_memory(self) -> None:
        """Wait for memory that was let go of, but not for ever: who holds a tensor over it for longer holds it on all ranks."""
        until = time.perf_counter() + PATIENCE_S
        while any(storage() is not None for storage in self._let_go) and time.perf_counter() < until:
            time.sleep(PATIENCE_S / 10_000)
        self._let_go.clear()

    def _state(self) -> DeviceState:
        self._settle_memory()
        held, busy = {}, set()
        for index, seat in enumerate(self._seats):
            if seat.block is not None:
                held[index] = seat.block.nbytes
                if seat.pins or seat.residency is Residency.FETCHING or index == self._current:
                    busy.add(index)
        return DeviceState(
            held=held,
            busy=busy,
            capacity_bytes=sum(held.values()) + self.arena.free_bytes,
            current=self._current,
        )

    def _prefetch(self) -> None:
        upcoming = self.trace.ahead
        if not upcoming:
            return
        reach = self._timetable.reach(self.trace.position) if self._timetable is not None else None
        for action in self._scheduler.prefetch(self._state(), upcoming, reach=reach):
            if action.verb is Verb.EVICT:
                self._evict(action.group)
            else:
                block = self._try_alloc(self.sources[action.group].nbytes, self.sources[action.group].name)
                if block is None or not self._start(action.group, block, Priority.PREFETCH):
                    return  # fragmented, or no staging memory: the demand will come and wait

    def _make_resident(self, index: int) -> None:
        seat = self._seats[index]
        began = time.perf_counter()
        if seat.residency is Residency.DIRTY:
            self._evict(index)  # see [Note: renewed copies]
        if seat.kept:
            self.counters.kept_bytes += self.sources[index].nbytes
        if seat.residency is Residency.ABSENT:
            self.counters.demand_fetches += 1
            while not self._start(index, self._room_for(index), Priority.DEMAND):
                if not self._give_up_a_prefetch():  # it holds the buffer that the demand needs
                    raise RuntimeError(f"{self.sources[index].name} cannot be fetched although nothing else is")
        self._arrive(index)
        ended = time.perf_counter()
        self.counters.stalled_s += ended - began
        self.spans.add("stall", self.sources[index].name, began, ended)

    def _give_up_a_prefetch(self) -> bool:
        """Drop the fetch under way whose group is used last: it came too early. False when there is none."""
        waiting = [i for i, seat in enumerate(self._seats) if seat.residency is Residency.FETCHING]
        if waiting:
            upcoming = self.trace.ahead
            self._drop(max(waiting, key=lambda group: (upcoming.next_use(group), group)))
        return bool(waiting)

    def _start(self, index: int, block: Block, priority: Priority) -> bool:
        seat, source = self._seats[index], self.sources[index]
        transfer = source.start(block, priority)
        if transfer is None:
            self.give_back(block)
            return False
        seat.residency = seat.residency.fetch()
        seat.block, seat.transfer, seat.started = block, transfer, time.perf_counter()
        self.counters.fetches += 1
        self.counters.fetched_bytes += source.nbytes
        return True

    def _arrive(self, index: int) -> None:
        seat, source = self._seats[index], self.sources[index]
        transfer, block = seat.transfer, seat.block
        if transfer is None or block is None:
            raise RuntimeError(f"{source.name} is not being fetched")
        seat.transfer = None
        try:
            transfer.wait()
        except BaseException:
            fetching = seat.residency is Residency.FETCHING
            seat.residency = seat.residency.fail() if fetching else seat.residency.evict()
            seat.block = None
            self.give_back(block)
            raise
        if seat.residency is Residency.FETCHING:
            seat.residency = seat.residency.arrive()
            self.spans.add("nvme->host: parameters", source.name, seat.started, time.perf_counter())
        source.bind(block)

    def _drop(self, index: int) -> None:
        """Give up a fetch that is under way."""
        seat = self._seats[index]
        transfer, block = seat.transfer, seat.block
        seat.transfer = seat.block = None
        seat.residency = seat.residency.fail()
        try:
            if transfer is not None:
                transfer.drop()
        finally:
            if block is not None:
                self.give_back(block)

    def _evict(self, index: int) -> None:
        seat = self._seats[index]
        if seat.residency is Residency.DIRTY:
            self.settle_changes()
        bound = not seat.kept
        seat.residency = seat.residency.drop() if seat.residency is Residency.DIRTY else seat.residency.evict()
        block, seat.block, seat.transfer = seat.block, None, None
        if bound:
            self.sources[index].unbind()
        if block is not None:
            self.give_back(block)
        self.counters.evictions += 1

    def _keep(self, index: int, *, renewed: bool) -> None:
        """Let go of a bound copy, not of what it holds."""
        seat, source = self._seats[index], self.sources[index]
        if seat.pins:
            raise RuntimeError(f"{source.name} is in use and cannot be let go of")
        if seat.block is None:
            raise RuntimeError(f"{source.name} has no copy to be kept")
        if renewed:
            seat.residency = seat.residency.write().written()
        source.unbind()
        seat.transfer = source.keep(seat.block, renewed=renewed)

    def _remove(self, index: int) -> None:
        """Have no copy of the group, whatever there is now."""
        seat = self._seats[index]
        if seat.pins:
            raise RuntimeError(f"{self.sources[index].name} is in use and cannot be dropped")
        if seat.residency is Residency.FETCHING:
            self._drop(index)
        elif seat.residency is not Residency.ABSENT:
            self._evict(index)

    def _room_for(self, index: int) -> Block:
        """A block for a demanded group."""
        return self.make_room(self.sources[index].nbytes, self.sources[index].name)

    def make_room(self, nbytes: int, owner: str, *, patient: bool = True) -> Block:
        """A block of the device tier: evicts idle groups, furthest next use first, until it fits. Raises BudgetError; unless
        ``patient``, without waiting for memory that is still being let go of."""
        upcoming = self.trace.ahead
        while True:
            block = self._try_alloc(nbytes, owner)
            if block is not None:
                return block
            state = self._state()
            idle = [group for group in state.held if group not in state.busy]
            if idle:
                self._evict(max(idle, key=lambda group: (upcoming.next_use(group), group)))
                continue
            if not self._give_up_a_prefetch():
                if not patient:
                    raise self._refusal(nbytes, owner)
                return self._room_soon(nbytes, owner)

    def _try_alloc(self, nbytes: int, owner: str) -> Block | None:
        self._settle_memory()
        return self.arena.try_alloc(nbytes, owner, last=nbytes != self._tile)

    def _room_soon(self, nbytes: int, owner: str) -> Block:
        """Nothing is left to evict; but the update may still be copying from a group that was, for a few milliseconds."""
        until = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < until:
            time.sleep(PATIENCE_S / 1000)
            block = self._try_alloc(nbytes, owner)
            if block is not None:
                return block
        raise self._refusal(nbytes, owner)

    def _refusal(self, nbytes: int, owner: str) -> BudgetError:
        in_use = [self.sources[i].name for i, seat in enumerate(self._seats) if seat.pins]
        return BudgetError(
            f"{self.arena.tier} arena: {owner} wants {nbytes:,} bytes of a window of {self.arena.nbytes:,}, of "
            f"which {self.arena.free_bytes:,} are free (largest hole {self.arena.largest_hole:,}), and nothing else can be "
            f"evicted: in use are {', '.join(in_use) or 'no groups, but tensors over evicted ones are still held'}. "
            f"Raise tiers.{self.arena.tier}_bytes",
            owner=owner,
            wanted=nbytes,
            free=self.arena.free_bytes,
            budget=self.arena.nbytes,
            largest=self.arena.largest_hole,
        )

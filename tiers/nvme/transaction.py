"""A transaction: the next generation while it is written, and the promise that it counts as a whole or not at
all."""

import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lamina.aio_native import Priority
from lamina.tiers.errors import StoreError, fault
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.handle import Part, TransferHandle, as_bytes
from lamina.tiers.nvme.landing import Awaited, Landing, LateTransfer, Promise, PromisedWrites
from lamina.tiers.nvme.layout import PlaneExtent
from lamina.tiers.nvme.moving import move_written
from lamina.tiers.nvme.pending import PendingWrite, PendingWrites
from lamina.tiers.nvme.slot import Slot, first_failure
from lamina.tiers.nvme.source import Source, in_source
from lamina.tiers.nvme.stream import Piece, Scratch, check_chunks, cut, pump, reader
from lamina.tiers.nvme.taken_sums import TakenSums
from lamina.tiers.tier import Plane


class TransactionState(enum.StrEnum):
    """OPEN leads to LANDING, COMMITTED or ABORTED, LANDING to one of the last two, nothing else to anything."""

    OPEN = "open"
    LANDING = "landing"
    """It is being committed in the background; see landing.py."""
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(kw_only=True)
class Target:
    """Files being written and what is known of their chunks. in_place: they hold the current generation
    too."""

    slot: Slot
    sums: ChunkSums
    in_place: bool = False
    dirty: bool = False


class Owner(Protocol):
    """What a transaction needs of its store."""

    def first_write(self, target: Target) -> None:
        """Called before the first byte of a target is written."""

    def replace_slot(self, slot: Slot, stripe: int, error: OSError) -> Slot:
        """A fresh slot without the path that failed; raises StorageFault when there is none."""

    def discard_slot(self, slot: Slot) -> None:
        """A slot is not needed any more."""

    def publish(self, targets: Iterable[Target], step: int, meta: Mapping[str, Any], durable: bool) -> None:
        """Make the targets the current generation."""

    def land(self, landing: Landing) -> None:
        """Start it; until it is over it is what is read from."""

    def closed(self, state: TransactionState, targets: Iterable[Target]) -> None:
        """The transaction has ended."""


class Transaction:
    """Writes the next generation out of place. Made by GenerationStore.begin(); thread safe.

    As a context manager it aborts unless commit() was reached.
    """

    def __init__(
        self,
        owner: Owner,
        main: Target,
        frozen: Target | None,
        source: Source | None,
        *,
        generation_id: int,
        frozen_names: frozenset[str],
        verify: str,
    ) -> None:
        self.id = generation_id
        self.state = TransactionState.OPEN
        self._owner = owner
        self._main = main
        self._frozen = frozen
        self._source = source
        self._frozen_names = frozen_names
        self._verify = verify
        self._pending = PendingWrites()
        self._late: list[LateTransfer] = []
        self._promises: dict[str, Promise] = {}  # by shard
        self._lock = threading.RLock()

    def write(
        self,
        shard: str,
        plane: Plane,
        buffer: Any,
        *,
        offset: int = 0,
        priority: Priority = Priority.WRITE_BACK,
        taken: Sequence[TakenSums] = (),
    ) -> TransferHandle:
        """Start writing a buffer at BYTE offset of a whole plane. Any size and offset; the last of overlapping
        writes wins.

        taken: checksums of the buffer's pieces, sorted, from whoever wrote them: only the rest is read for its checksum.
        The buffer must not change until the handle's wait() returns (or commit does). Raises KeyError,
        ValueError for what does not exist, StoreError for a frozen plane that is written already.
        """
        view = as_bytes(buffer)
        with self._lock:
            self._require_writable(shard)
            target = self._target(shard)
            extent = target.slot.layout.extent(shard, plane)
            offset -= extent.front
            handle = self._start(target, extent, offset, view, priority)
        # What is not taken yet is read while the disk works; both only read.
        measured = target.sums.measure(extent, offset, view, taken)
        with self._lock:
            target.sums.put(measured)
        return handle

    def begin_of(self, shard: str, plane: Plane) -> int:
        """BYTE offset in the whole plane of the first byte that the generation holds. Raises KeyError."""
        with self._lock:
            return self._target(shard).slot.layout.extent(shard, plane).front

    def promise(self, shard: str) -> Promise:
        """Before a commit in the background: all of a trained shard will be written, also after it has begun. See
        [Note: promised writes]; whoever asked keeps the promise or breaks it, whatever becomes of the transaction."""
        with self._lock:
            self._require_open()
            if shard in self._frozen_names or self.in_place:
                raise ValueError(f"{shard} is frozen or written in place: its writes cannot be promised")
            promise = self._promises[shard] = Promise(shard)
            return promise

    @property
    def checksum_read_bytes(self) -> int:
        """Bytes that were read again only for their checksums."""
        with self._lock:
            return sum(target.sums.num_read for target in self._targets())

    def read(
        self, shard: str, plane: Plane, buffer: Any, *, offset: int = 0, priority: Priority = Priority.DEMAND
    ) -> TransferHandle:
        """Read back what this transaction wrote. Raises StoreError for bytes that it has not written."""
        view = as_bytes(buffer)
        with self._lock:
            self._require_open()
            target = self._target(shard)
            extent = target.slot.layout.extent(shard, plane)
            offset -= extent.front
            target.slot.layout.check_range(extent, offset, len(view))
            if not target.sums.covered(extent, offset, len(view)):
                raise StoreError(
                    f"{extent.title}: bytes {extent.front + offset:,} to {extent.front + offset + len(view):,} were not all "
                    "written in "
                    "this "
                    "transaction: write them, call copy_rest(), or read the current generation from the store"
                )
            self._settle(self._pending.touching(extent, offset, len(view)))
            parts = target.slot.read(extent, offset, view, priority)
            return target.slot.track(TransferHandle(parts, view))

    def read_landing(
        self, shard: str, plane: Plane, view: memoryview, *, offset: int, priority: Priority
    ) -> TransferHandle | None:
        """Read what is being committed in the background, without a wait for what is still being written. None where it is not,
        any more, or where the shard is none of those that it writes. Raises KeyError, ValueError."""
        with self._lock:
            if self.state is not TransactionState.LANDING or (self._frozen is None and shard in self._frozen_names):
                return None
            target = self._target(shard)
            extent = target.slot.layout.extent(shard, plane)
            offset -= extent.front
            target.slot.layout.check_range(extent, offset, len(view))

            def touching() -> list[TransferHandle]:
                with self._lock:
                    return [write.handle for write in self._pending.touching(extent, offset, len(view))]

            promise = self._promises.get(shard)
            writes: Sequence[Awaited] = touching()
            if promise is not None and not promise.kept:
                writes = [PromisedWrites(promise, touching)]
            handle: TransferHandle
            if not writes:
                handle = TransferHandle(target.slot.read(extent, offset, view, priority), view)
                return target.slot.track(handle)

            def start() -> Sequence[Part]:
                if self.state is TransactionState.ABORTED:
                    raise StoreError(
                        f"{extent.title}: the commit of generation {self.id} failed before it could be read"
                    )
                parts = target.slot.read(extent, offset, view, priority)
                target.slot.track(late)
                return parts

            late = LateTransfer(view, writes, start, self._lock)
            self._late.append(late)
            return late

    @property
    def in_place(self) -> bool:
        """Whether it overwrites the current generation (generations: 1)."""
        return self._main.in_place

    def missing(self) -> list[str]:
        """Names of the planes (shard/plane) of which bytes are still missing, and not promised."""
        with self._lock:
            return [
                extent.title
                for target in self._targets()
                for extent in target.slot.layout.extents.values()
                if not self._is_awaited(extent.shard) and next(iter(target.sums.gaps(extent)), None) is not None
            ]

    def copy_rest(self) -> int:
        """Carry over from the current generation what this transaction has not written; bytes copied.

        Runs through a few buffers (see stream.SCRATCH_BYTES). Raises StoreError before the first commit and
        IntegrityError when the current generation is damaged.
        """
        with self._lock:
            self._require_open()
            target, source = self._main, self._source
            gaps = [
                (extent, offset, nbytes)
                for extent in target.slot.layout.extents.values()
                if extent.shard not in self._promises
                for offset, nbytes in target.sums.gaps(extent)
            ]
        if not gaps:
            return 0
        if source is None:
            raise StoreError(
                f"nothing was committed yet, so {gaps[0][0].title} cannot be carried over: write every plane"
            )
        there = [in_source(source, *gap) for gap in gaps]
        with Scratch(target.slot.layout.chunk_bytes) as scratch:
            pieces = cut(there, source.slot.layout.chunk_bytes, scratch.piece_bytes)
            pump(reader(source.slot), pieces, scratch, lambda piece, view: self._carry(target, source, piece, view))
        return sum(nbytes for _, _, nbytes in gaps)

    def _carry(self, target: Target, source: Source, piece: Piece, view: memoryview) -> TransferHandle:
        kept = piece.extent
        if self._verify != "off":
            check_chunks(source.slot, source.sums, kept, piece.offset, view, source.title)
        part = view[piece.start : piece.end]
        with self._lock:
            self._require_open()
            extent = target.slot.layout.extent(kept.shard, kept.plane)
            offset = piece.offset + piece.start + kept.front - extent.front
            handle = self._start(target, extent, offset, part, Priority.WRITE_BACK)
            if len(part) == len(view) and kept.front == extent.front:
                # Whole chunks, with the checksums that they had: a damage that nobody has looked for stays visible.
                target.sums.put(source.sums.known(kept, piece.offset, piece.nbytes, extent))
            else:
                target.sums.put(target.sums.measure(extent, offset, part))
        return handle

    def commit(
        self,
        step: int,
        meta: Mapping[str, Any] | None = None,
        *,
        durable: bool = False,
        background: bool = False,
        landed: Callable[[], None] = lambda: None,
    ) -> None:
        """Make this the current generation.

        After a kill of the process the store reopens with this generation or, before this returns, with the
        one before; durable also survives the loss of power. Raises StoreError naming planes that are missing
        (the transaction stays open) and StorageFault when a disk failed (abort it; the generation before
        still counts).

        background: return at once; writes under way and all that follows goes on in a thread, and the store is read as after it.
        What meta holds must stay as it is until then. The store's settle() waits for the end, as does everything that needs the
        commit, and tells what went wrong; see landing.py. An update in place is committed at once all the same: there is nothing
        else that could count meanwhile. ``landed`` is called once it counts, in whichever thread that is.
        """
        remembered = dict(meta or {})
        with self._lock:
            self._require_open()
            self._require_whole(step)
            if self._promises and not background:
                raise StoreError(f"{', '.join(self._promises)}: promised writes are for a commit in the background")
            if background and not self.in_place:
                self.state = TransactionState.LANDING
                self._owner.land(Landing(lambda: self._land_or_drop(step, remembered, durable, landed)))
                return
            self._land(step, remembered, durable)
            landed()

    def _require_whole(self, step: int) -> None:
        missing = self.missing()
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise StoreError(
                f"cannot commit step {step}: not written: {', '.join(missing[:8])}{more}. Write them, or call copy_rest() to "
                "carry them over from the current generation"
            )

    def _land(self, step: int, meta: Mapping[str, Any], durable: bool) -> None:
        """Wait for the writes and make it current. In the background the lock is held only for what others look at."""
        self._drain_writes()
        for promise in self._promises.values():
            promise.wait()
            self._drain_writes()
        self._require_whole(step)
        for target in self._targets():
            self._finish_target(target, durable)
        self._owner.publish(self._targets(), step, meta, durable)
        self._end(TransactionState.COMMITTED)

    def _land_or_drop(self, step: int, meta: Mapping[str, Any], durable: bool, landed: Callable[[], None]) -> None:
        try:
            self._land(step, meta, durable)
        except BaseException:
            self._drop()
            raise
        landed()

    def _drain_writes(self) -> None:
        """Wait for those that are under way, and begin the reads that waited for them."""
        while (oldest := self._oldest()) is not None:
            oldest.handle.wait()
            self._over(oldest)
        self._begin_late()

    def _oldest(self) -> PendingWrite | None:
        with self._lock:
            return self._pending.oldest()

    def _over(self, write: PendingWrite) -> None:
        """A write has succeeded: begin the reads that waited for it."""
        with self._lock:
            self._pending.remove(write)
        self._begin_late()

    def _begin_late(self) -> None:
        with self._lock:
            for late in self._late:
                if late.ready:
                    late.begin()
            self._late = [late for late in self._late if not late.ready]

    def abort(self) -> None:
        """Drop what was written; harmless when repeated or after commit()."""
        with self._lock:
            if self.state is TransactionState.OPEN:
                self._drop()

    def _drop(self) -> None:
        with self._lock:
            for write in self._pending.all():
                write.handle.drain()
            self._end(TransactionState.ABORTED)

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def _end(self, state: TransactionState) -> None:
        with self._lock:
            self._pending = PendingWrites()
            self._late = []
            self.state = state
            self._owner.closed(state, self._targets())

    def _require_open(self) -> None:
        if self.state is not TransactionState.OPEN:
            raise StoreError(f"the transaction of generation {self.id} is {self.state}: begin() another")

    def _require_writable(self, shard: str) -> None:
        if not (self.state is TransactionState.LANDING and self._is_awaited(shard)):
            self._require_open()

    def _is_awaited(self, shard: str) -> bool:
        promise = self._promises.get(shard)
        return promise is not None and not promise.kept

    def _targets(self) -> list[Target]:
        return [self._main] if self._frozen is None else [self._main, self._frozen]

    def _target(self, shard: str) -> Target:
        if shard not in self._frozen_names:
            return self._main
        if self._frozen is None:
            raise StoreError(f"shard {shard} is frozen and was written already: frozen shards are written once")
        return self._frozen

    def _start(
        self, target: Target, extent: PlaneExtent, offset: int, view: memoryview, priority: Priority
    ) -> TransferHandle:
        """Put a write under way. The lock is held."""
        target.slot.layout.check_range(extent, offset, len(view))
        self._reap()
        self._settle(self._pending.touching(extent, offset, len(view)))
        if not target.dirty:
            self._owner.first_write(target)
            target.dirty = True

        target.sums.announce(extent, offset, len(view))
        started_in = target.slot

        def rescue(stripe: int, error: OSError) -> list[Part]:
            nonlocal started_in
            if self.state in (TransactionState.COMMITTED, TransactionState.ABORTED):
                torn = target.in_place and self.state is TransactionState.ABORTED
                raise fault(error, f"a write of generation {self.id}, which is {self.state},", torn=torn)
            if target.slot is started_in:
                self._replan(target, stripe, error)
            started_in = target.slot
            again = started_in.layout.extent(extent.shard, extent.plane)
            return started_in.write(again, offset, view, priority)

        parts = started_in.write(extent, offset, view, priority)
        handle = TransferHandle(parts, view, rescue=rescue, lock=self._lock)
        self._pending.add(PendingWrite(target.slot.record.is_frozen, extent, offset, len(view), handle))
        return handle

    def _reap(self) -> None:
        """Let go of writes that are done; a failed one is rescued or raises."""
        while (oldest := self._pending.oldest()) is not None and oldest.handle.done():
            self._settle([oldest])

    def _settle(self, writes: Iterable[PendingWrite]) -> None:
        for write in writes:
            write.handle.wait()
            self._pending.remove(write)

    def _finish_target(self, target: Target, durable: bool) -> None:
        """Checksums that overlapping writes hid, the checksum tables, and durability."""
        chunk_bytes = target.slot.layout.chunk_bytes
        stale = [
            (extent, chunk * chunk_bytes, target.sums.chunk_bytes(extent, chunk))
            for extent in target.slot.layout.extents.values()
            for chunk in target.sums.stale(extent)
        ]
        if stale:
            with Scratch(chunk_bytes, 4 * chunk_bytes) as scratch:

                def settle(piece: Piece, view: memoryview) -> None:
                    target.sums.recompute(piece.extent, piece.offset // chunk_bytes, view)

                pump(reader(target.slot), cut(stale, chunk_bytes, chunk_bytes), scratch, settle)
        while (failure := self._seal(target, durable)) is not None:
            with self._lock:
                self._replan(target, *failure)

    @staticmethod
    def _seal(target: Target, durable: bool) -> tuple[int, OSError] | None:
        """Write the checksum tables and (durable) sync; the stripe that failed and why, if one did."""
        tables = target.sums.tables()
        failure = first_failure(target.slot.write_tables(tables))
        return failure if failure or not durable else target.slot.make_durable()

    def _replan(self, target: Target, stripe: int, error: OSError) -> None:
        """A path failed: move what was written to files on the other paths, and go on there.

        Writes that failed too are not moved: their own rescue starts them again. The lock is held.
        """
        if target.in_place:
            raise fault(error, "an in-place write, which cannot move to another path,", torn=True)
        writes = [write for write in self._pending.all() if write.frozen == target.slot.record.is_frozen]
        for write in writes:
            write.handle.drain()
        lost = [write for write in writes if write.handle.failed()]
        old = target.slot
        new = self._owner.replace_slot(old, stripe, error)
        try:
            move_written(old, new, target.sums, lost)
        except (OSError, StoreError) as second:
            raise fault(error, f"a write (and moving to another path: {second})") from second
        target.slot = new
        target.sums = target.sums.relaid(new.layout)
        self._owner.discard_slot(old)

"""The generation store: a rank's NVMe state, updated out of place and made current by one atomic rename.

[Note: what survives what]
A killed process: every commit that returned, and perhaps the one that was under way. Data and manifest are with the
kernel by then, and nothing of the current generation is overwritten before another one counts.
A loss of power: every commit with durable=True, and every pin. A commit without it has its manifest on disk, and with
direct I/O usually its data; where the disk had not written something, the checksums find it at the next start, and a
checkpoint (or with generations: 3 an older generation) is the way back. Nothing is ever taken for right unchecked
unless verify is "off".
A failing or full disk: an update moves to the other paths where there are some with room; otherwise it fails, and the
generation before still counts.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamina.aio_native import AsyncIO, Priority
from lamina.tiers.chunk_sums import ChunkSums
from lamina.tiers.errors import IntegrityError, SpaceError, StoreError, fault
from lamina.tiers.handle import TransferHandle, as_bytes
from lamina.tiers.layout import require_same_shards
from lamina.tiers.lock import FolderLock
from lamina.tiers.manifest import FrozenRecord, GenerationRecord, Manifest
from lamina.tiers.opening import Opening, Verify, read_sums, table_crcs
from lamina.tiers.pin import CopyJob, PinnedGeneration, copy_files, start_pin
from lamina.tiers.pinned_reader import PinnedReader
from lamina.tiers.restore import copy_into, link_into
from lamina.tiers.slot import Slot
from lamina.tiers.slot_pool import SlotPool
from lamina.tiers.stream import check_chunks, check_edges
from lamina.tiers.tier import NvmePath, Plane, ShardSpec
from lamina.tiers.transaction import Source, Target, Transaction, TransactionState
from lamina.tiers.wear import PathWear


@dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """A committed generation: its number, the training step and what the caller wanted remembered."""

    id: int
    step: int
    meta: Mapping[str, Any]
    durable: bool


class GenerationStore:
    """State of one rank of one job on one or more NVMe paths. Made by open(); thread safe; context manager.

    recovered: sentences about what the opening found and did.
    """

    def __init__(
        self, pool: SlotPool, locks: Sequence[FolderLock], *, verify: Verify, recovered: Sequence[str]
    ) -> None:
        self.recovered = tuple(recovered)
        self._pool = pool
        self._locks = list(locks)
        self._verify: Verify = verify
        self._lock = threading.RLock()
        self._committed = list(pool.manifest.committed)
        self._sums: dict[str, ChunkSums] = {}
        self._transaction: Transaction | None = None
        self._pins: list[PinnedGeneration] = []
        self._torn = False
        self._closed = False
        self._frozen_names = frozenset(shard.name for shard in pool.frozen_shards)

    @classmethod
    def open(
        cls,
        paths: Sequence[NvmePath],
        *,
        job: str,
        rank: int,
        shards: Sequence[ShardSpec],
        io: AsyncIO,
        generations: int = 2,
        verify: Verify = "resume",
        chunk_bytes: int | None = None,
        discard_torn: bool = False,
        at_step: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "GenerationStore":
        """Create the rank's files, or reopen them at the last committed generation.

        generations: file sets that rotate. 2: update out of place. 3: one more committed generation is kept.
        1: update in place, with half the space; a crash during an update then loses the state (checkpoints
        remain). verify: "resume" checks every byte here; "always" also whatever is read; "off" nothing.
        progress(done, total): bytes checked so far. discard_torn: start anew after a cut in-place update. at_step: go
        back to an older generation that is still kept (generations: 3 keeps two at any time), checked in any case.

        Raises LockedError (in use), LayoutError (other shards), SpaceError (no room), IntegrityError
        (damage), StoreError, ValueError.
        """
        opening = Opening(paths, job=job, rank=rank, shards=shards, io=io, generations=generations, verify=verify)
        pool, locks = opening.run(chunk_bytes=chunk_bytes, discard_torn=discard_torn)
        store = cls(pool, locks, verify=verify, recovered=opening.notes)
        try:
            store._load(progress, at_step)
        except BaseException:
            store.close()
            raise
        return store

    def _load(self, progress: Callable[[int, int], None] | None, at_step: int | None) -> None:
        check = self._verify != "off"
        if at_step is not None:
            kept = [record.step for record in self._committed]
            if at_step not in kept:
                raise StoreError(f"no generation of step {at_step} is kept; there is: {kept or 'none'}")
            self._committed = self._committed[kept.index(at_step) :]
        if self._committed:
            record = self._committed[0]
            slot = self._pool.require_slot(record.slot)
            title = f"generation {record.id}, step {record.step}"
            check_it = check or at_step is not None
            try:
                sums = read_sums(slot, record.sums_crc, title, check=check_it, progress=progress)
            except IntegrityError as error:
                if len(self._committed) > 1:
                    error.add_hint(f"or try the generation before it: open with at_step={self._committed[1].step}")
                raise
            self._sums[record.slot.stem] = sums
        frozen = self._pool.manifest.frozen
        if frozen is not None:
            slot = self._pool.require_slot(frozen.slot)
            sums = read_sums(slot, frozen.sums_crc, "frozen planes", check=check, progress=progress)
            self._sums[frozen.slot.stem] = sums

    @property
    def current(self) -> GenerationInfo | None:
        """The last committed generation, or None before the first commit."""
        with self._lock:
            return _info(self._committed[0]) if self._committed else None

    @property
    def shards(self) -> tuple[ShardSpec, ...]:
        """What the store holds, in execution order."""
        return self._pool.manifest.shards

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all files that are open, padding and checksums included."""
        with self._lock:
            return sum(sum(slot.layout.file_bytes) for slot in self._pool.slots.values())

    def read(
        self, shard: str, plane: Plane, buffer: Any, *, offset: int = 0, priority: Priority = Priority.DEMAND
    ) -> TransferHandle:
        """Start reading from BYTE offset of a plane of the current generation into a writable buffer.

        The handle owns the buffer; its wait() raises IntegrityError under verify="always" when a chunk is damaged (of
        which only a part is wanted, it is read whole beside). Raises KeyError, ValueError, StoreError.
        """
        view = as_bytes(buffer)
        if view.readonly and len(view):
            raise TypeError(f"{shard}/{plane}: the buffer to read into is read-only")
        with self._lock:
            slot, sums, title = self._readable(shard)
            extent = slot.layout.extent(shard, plane)
            parts = slot.read(extent, offset, view, priority)
            if self._verify != "always" or self._torn:
                return slot.track(TransferHandle(parts, view))

        def check(data: memoryview) -> None:
            check_chunks(slot, sums, extent, offset, data, title)
            check_edges(slot, sums, extent, offset, data, title)

        return slot.track(TransferHandle(parts, view, finish=check))

    def _readable(self, shard: str) -> tuple[Slot, ChunkSums, str]:
        self._require_open()
        manifest = self._pool.manifest
        if shard in self._frozen_names:
            if manifest.frozen is None:
                raise StoreError(
                    f"shard {shard} is frozen and was not written yet: commit a transaction that writes it"
                )
            stem, title = manifest.frozen.slot.stem, "frozen planes"
        else:
            if not self._committed:
                raise StoreError(f"nothing was committed yet, so {shard} cannot be read")
            record = self._committed[0]
            stem, title = record.slot.stem, f"generation {record.id}, step {record.step}"
        return self._pool.slots[stem], self._sums[stem], title

    def begin(self) -> Transaction:
        """Start the next generation. Raises StoreError when one is open already, SpaceError when a checkpoint
        holds the files that would be next and there is no room for new ones."""
        with self._lock:
            self._require_open()
            return self._begin()

    def _begin(self, *, replace_frozen: bool = False) -> Transaction:
        with self._lock:
            if self._transaction is not None:
                raise StoreError(
                    f"the transaction of generation {self._transaction.id} is still open: commit() or abort() it first"
                )
            current = self._committed[0] if self._committed else None
            source = None
            if current is not None:
                title = f"generation {current.id}, step {current.step}"
                source = Source(
                    slot=self._pool.slots[current.slot.stem], sums=self._sums[current.slot.stem], title=title
                )
            self._pool.wear.start_step()
            self._transaction = Transaction(
                self,
                self._main_target(source),
                self._frozen_target(replace_frozen),
                source,
                generation_id=current.id + 1 if current else 1,
                frozen_names=self._frozen_names,
                verify=self._verify,
            )
            return self._transaction

    def _frozen_target(self, replace: bool) -> Target | None:
        if not self._frozen_names or (self._pool.manifest.frozen is not None and not replace):
            return None
        if replace and self._pool.manifest.frozen is not None:
            (slot,) = self._pool.fresh([self._pool.next_frozen_stem()])
        else:
            slot = next(slot for slot in self._pool.slots.values() if slot.record.is_frozen)
        return Target(slot=slot, sums=ChunkSums(slot.layout))

    def _main_target(self, source: Source | None) -> Target:
        pool = self._pool
        if pool.manifest.generations == 1 and source is not None and pool.writable(source.slot):
            source.slot.drain()
            return Target(slot=source.slot, sums=ChunkSums(source.slot.layout, source.sums.values[:]), in_place=True)
        age = {record.slot.stem: -record.id for record in self._committed}
        others = [s for s in pool.slots.values() if not s.record.is_frozen and (source is None or s is not source.slot)]
        others.sort(key=lambda slot: -age.get(slot.record.stem, 1))
        slot = others[0] if others else None
        old_stem = slot.record.stem if slot else ""
        if slot is not None:
            slot.drain()
        if slot is None or not pool.writable(slot):
            try:
                (slot,) = pool.fresh([pool.next_stem()], replacing=[slot] if slot else [])
            except SpaceError as error:
                raise SpaceError(
                    f"{error}. A checkpoint shares the files that would be next, so new ones are needed: removing an old "
                    "checkpoint helps too",
                    wanted=error.wanted,
                    free=error.free,
                ) from error
        # What is about to be overwritten is no generation any more.
        self._committed = [record for record in self._committed if record.slot.stem != old_stem]
        return Target(slot=slot, sums=ChunkSums(slot.layout))

    def first_write(self, target: Target) -> None:
        """[Owner] Say on disk that an in-place update has begun, so that a crash is noticed."""
        if target.in_place:
            self._pool.save(self._pool.manifest.with_(updating=self._committed[0].id + 1))
            self._torn = True

    def replace_slot(self, slot: Slot, stripe: int, error: OSError) -> Slot:
        """[Owner] Files without the path that failed."""
        with self._lock:
            try:
                self._pool.blame(error, slot.where[stripe])
                stem = self._pool.next_frozen_stem() if slot.record.is_frozen else self._pool.next_stem()
                (new,) = self._pool.fresh([stem])
            except (OSError, SpaceError) as second:
                said = "a write" if second is error else f"a write (and no other path could take over: {second})"
                raise fault(error, said) from second
            return new

    def discard_slot(self, slot: Slot) -> None:
        """[Owner] Remove the files that a transaction has moved away from."""
        with self._lock:
            self._pool.drop([slot])

    def publish(self, targets: Iterable[Target], step: int, meta: Mapping[str, Any], durable: bool) -> None:
        """[Owner] The atomic commit."""
        with self._lock:
            manifest = self._pool.manifest
            frozen = manifest.frozen
            main: Target | None = None
            for target in targets:
                if target.slot.record.is_frozen:
                    frozen = FrozenRecord(slot=target.slot.record, sums_crc=table_crcs(target.sums), durable=durable)
                else:
                    main = target
            if main is None:
                raise StoreError("a transaction without files")
            last = self._committed[0].id if self._committed else 0
            record = GenerationRecord(
                id=last + 1,
                step=step,
                meta=meta,
                durable=durable,
                slot=main.slot.record,
                sums_crc=table_crcs(main.sums),
            )
            older = [old for old in self._committed if old.slot.stem != record.slot.stem]
            kept = older[: max(0, manifest.generations - 1)]
            self._pool.save(manifest.with_(committed=(record, *kept), frozen=frozen, updating=None))
            self._committed = [record, *kept]
            self._sums = {target.slot.record.stem: target.sums for target in targets} | {
                stem: sums for stem, sums in self._sums.items() if stem == (frozen.slot.stem if frozen else "")
            }
            self._torn = False
            self._tidy(self._drop_surplus)

    def closed(self, state: TransactionState, targets: Iterable[Target]) -> None:
        """[Owner] A transaction has ended."""
        with self._lock:
            self._transaction = None
            self._tidy(self._drop_unused_frozen)

    def _tidy(self, work: Callable[[], None]) -> None:
        """Remove what is not needed any more. That it failed is no failure of what was done before: it is noted."""
        try:
            work()
        except (OSError, StoreError) as error:
            self._pool.notes.append(f"not removed: {error}")

    def _drop_unused_frozen(self) -> None:
        frozen = self._pool.manifest.frozen
        if frozen is not None:
            slots = self._pool.slots.values()
            unused = [slot for slot in slots if slot.record.is_frozen and slot.record.stem != frozen.slot.stem]
            if unused:
                self._pool.drop(unused)

    def pin(self, directory: str) -> PinnedGeneration:
        """Keep the current generation in a directory, as a checkpoint: durable, and never written again.

        On the same file system nothing is copied and the result is complete at once. Elsewhere the bytes are copied and
        checked in the background while training goes on; wait() for it. Files that a checkpoint shares are replaced, not
        rewritten, when their turn comes, which takes the space of one more generation for each checkpoint that is kept.
        Raises FileExistsError when the directory holds one already, StoreError, StorageFault, OSError.
        """
        with self._lock:
            self._require_open()
            if not self._committed:
                raise StoreError("nothing was committed yet, so there is nothing to pin")
            manifest = self._pool.manifest
            record = replace(self._committed[0], durable=True)
            frozen = manifest.frozen and replace(manifest.frozen, durable=True)
            stems = [record.slot.stem, *([frozen.slot.stem] if frozen else [])]
            sources = [(self._pool.slots[stem], self._sums[stem]) for stem in stems]
            for slot, _ in sources:
                if (failure := slot.make_durable()) is not None:
                    raise fault(failure[1], "making a generation durable") from failure[1]
            pinned_manifest = manifest.with_(
                committed=(record,),
                frozen=frozen,
                slots=tuple(slot.record for slot, _ in sources),
                retired=(),
                updating=None,
            )
            directory = os.path.abspath(directory)
            if any(pin.directory == directory and not pin.done() for pin in self._pins):
                raise FileExistsError(f"{directory}: a checkpoint is being copied there; name another directory")
            pinned, jobs = start_pin(directory, pinned_manifest, sources)
            if jobs:
                for job in jobs:
                    job.slot.hold()
                self._pins = [pin for pin in self._pins if not pin.done()]
                self._pins.append(pinned)
                pinned.start(lambda pin: self._copy(pin, jobs, pinned_manifest))
            return pinned

    def _copy(self, pinned: PinnedGeneration, jobs: Sequence[CopyJob], manifest: Manifest) -> None:
        """Body of a pin's thread."""
        try:
            copy_files(pinned, jobs, self._pool.io, manifest)
        finally:
            with self._lock:
                for job in jobs:
                    job.slot.unhold()

    def restore(self, directory: str) -> GenerationInfo:
        """Make a pinned generation the current one, checked unless verify is "off".

        Its files are linked where the file system allows (and then not written again), else copied. Raises LayoutError
        when it holds other shards, IntegrityError when it is damaged; then nothing was changed.
        """
        with self._lock:
            if self._closed:
                self._require_open()
            with PinnedReader(directory, self._pool.io) as pinned:
                require_same_shards(self.shards, pinned.shards, pinned.directory)
                sums = pinned.sums(check=self._verify != "off")
                linked = None if self._transaction else link_into(self._pool, pinned)
                if linked is None:
                    with self._begin(replace_frozen=pinned.frozen is not None) as transaction:
                        copy_into(transaction, pinned, sums)
                        transaction.commit(pinned.step, pinned.meta, durable=True)
                else:
                    targets = [Target(slot=slot, sums=sums[stem]) for stem, slot in linked.items()]
                    self.publish(targets, pinned.step, pinned.meta, True)
                    self._tidy(self._drop_unused_frozen)
            return _info(self._committed[0])

    def _drop_surplus(self) -> None:
        """Keep as many slots as there are generations, the committed ones first."""
        pool = self._pool
        order = [record.slot.stem for record in self._committed]
        main = [slot for slot in pool.slots.values() if not slot.record.is_frozen]
        main.sort(key=lambda slot: order.index(slot.record.stem) if slot.record.stem in order else len(order))
        surplus = main[pool.manifest.generations :]
        if surplus:
            gone = {slot.record.stem for slot in surplus}
            self._committed = [record for record in self._committed if record.slot.stem not in gone]
            pool.drop(surplus)

    def wear(self) -> list[PathWear]:
        """Bytes written and read per path, since the opening and in the current step."""
        return self._pool.wear.report()

    def report(self) -> str:
        """What the store is, where it lies, what happened to it and what it has written, for people."""
        with self._lock:
            manifest = self._pool.manifest
            info = self.current
            lines = [
                f"job {manifest.job!r} rank {manifest.rank}: {len(manifest.shards)} shards, "
                f"{self.bytes_on_disk:,} bytes "
                f"on disk in {manifest.generations} generation(s)",
                f"current: generation {info.id}, step {info.step}" if info else "nothing committed yet",
            ]
            if manifest.generations == 1:
                lines.append("updates in place: a crash during an update loses the state, checkpoints remain")
            lines += [f"{wear.path}: {wear.written:,} bytes written, {wear.read:,} read" for wear in self.wear()]
            return "\n".join([*lines, *self.recovered, *self._pool.notes])

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed: open it again")
        if self._pool.doubt:
            raise StoreError(
                f"{self._pool.doubt}, so it is not known which generation counts: close this store, open it again"
            )
        if self._torn and self._transaction is None:
            raise StoreError(
                "an in-place update was cut (generations: 1), so the state is a mixture of two steps: "
                "restore from a checkpoint, and use generations: 2 where there is room"
            )

    def close(self, *, remove: bool = False) -> None:
        """Abort what is open, close the files and unlock. remove: delete this rank's files, and the folders
        that are empty then. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            transaction = self._transaction
        if transaction is not None:
            transaction.abort()  # without the lock: a commit that is under way has its own and wants this one
        for pin in self._pins:
            pin.finish()
        with self._lock:
            self._pool.close(remove=remove)
            for lock in self._locks:
                lock.release(remove=remove)
            if remove:
                for folder in self._pool.folders:
                    folder.remove_empty()

    def __enter__(self) -> "GenerationStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _info(record: GenerationRecord) -> GenerationInfo:
    return GenerationInfo(id=record.id, step=record.step, meta=dict(record.meta), durable=record.durable)

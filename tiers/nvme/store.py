"""The generation store: a rank's NVMe state, updated out of place and made current by one atomic rename.

[Note: what survives what]
A killed process: every commit that returned, and perhaps the one that was under way. Data and manifest are with the
kernel by then, and nothing of the current generation is overwritten before another one counts.
A loss of power: every commit with durable=True, and every pin. A commit without it has its manifest on disk, and with direct
I/O usually its data; where the disk had not written something, the checksums find it at the next start, and a checkpoint (or
with generations: 3 an older generation) is the way back. Nothing is ever taken for right unchecked unless verify is "off".
A failing or full disk: an update moves to the other paths where there are some with room; otherwise it fails, and the
generation before still counts.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lamina.aio_native import AsyncIO, Priority
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.generation_info import GenerationInfo, info_of
from lamina.tiers.nvme.generations import Generations
from lamina.tiers.nvme.handle import HandleGroup, TransferHandle, as_bytes
from lamina.tiers.nvme.landing import Landing
from lamina.tiers.nvme.layout import require_same_shards
from lamina.tiers.nvme.lock import FolderLock, file_device
from lamina.tiers.nvme.opening import Opening, Verify
from lamina.tiers.nvme.pin import CopyJob, PinnedGeneration, copy_files, finish_pin, start_pin
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.restore import copy_into, link_into
from lamina.tiers.nvme.scratch import Scratch
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.slot_pool import SlotPool
from lamina.tiers.nvme.stream import check_chunks, check_edges
from lamina.tiers.nvme.transaction import Target, Transaction, TransactionState
from lamina.tiers.nvme.wear import PathWear
from lamina.tiers.tier import NvmePath, Plane, ShardSpec


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
        self._generations = Generations(pool)
        self._transaction: Transaction | None = None
        self._landing: Landing | None = None
        self._version = 0
        self._pins: list[PinnedGeneration] = []
        self._closed = False

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
        left_out: Iterable[str] = (),
        fronts: Mapping[str, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "GenerationStore":
        """Create the rank's files, or reopen them at the last committed generation.

        generations: file sets that rotate. 2: update out of place. 3: one more committed generation is kept.
        1: update in place, with half the space; a crash during an update then loses the state (checkpoints
        remain). verify: "resume" checks every byte here; "always" also whatever is read; "off" nothing.
        progress(done, total): bytes checked so far. discard_torn: start anew after a cut in-place update. at_step: go
        back to an older generation that is still kept (generations: 3 keeps two at any time), checked in any case.
        left_out, fronts: see leave_out().

        Raises LockedError (in use), LayoutError (other shards), SpaceError (no room), IntegrityError
        (damage), StoreError, ValueError.
        """
        opening = Opening(paths, job=job, rank=rank, shards=shards, io=io, generations=generations, verify=verify)
        pool, locks = opening.run(
            chunk_bytes=chunk_bytes, discard_torn=discard_torn, left_out=left_out, fronts=fronts or {}
        )
        store = cls(pool, locks, verify=verify, recovered=opening.notes)
        try:
            store._generations.load(progress, at_step, check=verify != "off")
        except BaseException:
            store.close()
            raise
        return store

    @property
    def current(self) -> GenerationInfo | None:
        """The last committed generation, or None before the first commit. Waits for a commit in the background, and raises what
        went wrong with it."""
        self.settle()
        with self._lock:
            record = self._generations.current
            return None if record is None else info_of(record)

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps of the generations that are kept, newest first. The oldest may have been begun to be overwritten."""
        self.settle()
        with self._lock:
            return self._generations.steps

    def go_back(self, step: int) -> None:
        """Make the generation of an earlier step that is still kept the current one, checked in any case. On disk nothing
        changes before the next commit. Raises StoreError where there is none or it holds other shards than the next one is to,
        IntegrityError where it is not whole any more; then nothing was changed."""
        self.settle()
        with self._lock:
            self._require_open()
            self._require_no_transaction()
            self._generations.require_alike(step)
            self._generations.load(None, step, check=True)
            self._version += 1

    @property
    def version(self) -> int:
        """Another number whenever read() gives other bytes than before: after a commit or, in the background, its beginning."""
        return self._version

    def settle(self) -> None:
        """Wait until nothing is being committed in the background. Raises what went wrong with the last such commit."""
        landing = self._landing
        if landing is not None:
            landing.wait()
            self._require_landed()

    def take_failure(self, *, wait: bool) -> Exception | None:
        """What went wrong with a commit in the background, as far as it is known, or after a ``wait`` for it. Nobody is told
        again: from then on the generation before it is the current one."""
        landing = self._landing
        if landing is None:
            return None
        if wait or landing.error is not None:
            landing.wait()
        if landing.error is not None:
            self._landing = None
            self._version += 1
        return landing.error

    def _require_landed(self) -> None:
        landing = self._landing  # once: another thread may take its failure meanwhile
        if landing is not None and landing.error is not None:
            raise landing.error.with_traceback(None)  # of whoever was told before

    @property
    def shards(self) -> tuple[ShardSpec, ...]:
        """What the next generation holds, in execution order."""
        with self._lock:
            held = {shard.name: shard for shard in self._pool.main_shards}
            shards = self._pool.manifest.shards
            return tuple(held.get(shard.name, shard) for shard in shards if shard.frozen or shard.name in held)

    def leave_out(self, names: Iterable[str], fronts: Mapping[str, int] | None = None) -> None:
        """From the next begin() on, generations hold all trained shards but these, and of those in ``fronts`` all but so many
        elements at the front: the rest lives elsewhere.

        It takes no space and is not asked for by commit(). What is left out no more has to be written in the next transaction.
        Offsets stay those of the whole plane. Files of the other kind are made anew in their turn. Raises KeyError for a name
        that is no trained shard's, ValueError for a front that is empty or the whole shard, StoreError while a transaction is
        open, SpaceError when there is no room for files that hold more; then nothing was changed.
        """
        self.settle()
        with self._lock:
            self._require_open()
            self._require_no_transaction()
            wanted, cut = frozenset(names), dict(fronts or {})
            numels = {shard.name: shard.numel for shard in self._pool.manifest.shards if not shard.frozen}
            if unknown := (wanted | cut.keys()) - numels.keys():
                raise KeyError(f"no trained shards: {', '.join(sorted(unknown))}")
            for name, numel in cut.items():
                if not 0 < numel < numels[name]:
                    raise ValueError(
                        f"a front of {numel:,} of the {numels[name]:,} elements of {name}: some, not all of them"
                    )
            if (wanted, cut) != (self._pool.left_out, self._pool.fronts):
                self._pool.leave_out(wanted, cut)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all files that are open, padding and checksums included."""
        with self._lock:
            return sum(sum(slot.layout.file_bytes) for slot in self._pool.slots.values())

    def read(
        self,
        shard: str,
        plane: Plane,
        buffer: Any,
        *,
        offset: int = 0,
        priority: Priority = Priority.DEMAND,
        version: int | None = None,
    ) -> TransferHandle:
        """Start reading from BYTE offset of a whole plane, out of the current generation or the one that is being committed
        in the background, into a writable buffer; with ``version``, as read when that was it: now, or before that commit began.
        The handle owns the buffer; its wait() raises IntegrityError under verify="always" when a chunk is damaged (of
        which only a part is wanted, it is read whole beside). Raises KeyError, ValueError, StoreError.
        """
        view = as_bytes(buffer)
        if view.readonly and len(view):
            raise TypeError(f"{shard}/{plane}: the buffer to read into is read-only")
        transaction = self._landing_for(version)
        if transaction is not None and self._verify == "always":
            self.settle()  # its checksums are complete by then
        elif transaction is not None:
            landing = transaction.read_landing(shard, plane, view, offset=offset, priority=priority)
            if landing is not None:
                return landing
        with self._lock:
            self._require_open()
            slot, sums, title = self._generations.readable(shard)
            extent = slot.layout.extent(shard, plane)
            within = offset - extent.front
            parts = slot.read(extent, within, view, priority)
            if self._verify != "always" or self._generations.torn:
                return slot.track(TransferHandle(parts, view))

        def check(data: memoryview) -> None:
            check_chunks(slot, sums, extent, within, data, title)
            check_edges(slot, sums, extent, within, data, title)

        return slot.track(TransferHandle(parts, view, finish=check))

    def _landing_for(self, version: int | None) -> Transaction | None:
        """What is being committed in the background, where that is to be read at this version."""
        with self._lock:
            landing = self._transaction if self._landing is not None else None
            if version is None or version == self._version:
                return landing
        if landing is None or version != self._version - 1:
            raise StoreError(f"what version {version} had was replaced: the store is at {self._version}")
        return None

    def begin(self, *, replace_frozen: bool = False) -> Transaction:
        """Start the next generation. replace_frozen: the frozen planes are written anew in it (when a model is loaded).
        Raises StoreError when one is open already, SpaceError when a checkpoint
        holds the files that would be next and there is no room for new ones. Waits for a commit in the background, whose
        failure it raises."""
        self.settle()
        with self._lock:
            self._require_open()
            return self._begin(replace_frozen=replace_frozen)

    def _begin(self, *, replace_frozen: bool = False) -> Transaction:
        with self._lock:
            if self._transaction is not None:
                raise StoreError(
                    f"the transaction of generation {self._transaction.id} is still open: commit() or abort() it first"
                )
            source, current = self._generations.source(), self._generations.current
            self._pool.wear.start_step()
            self._transaction = Transaction(
                self,
                self._generations.main_target(source),
                self._generations.frozen_target(replace=replace_frozen),
                source,
                generation_id=current.id + 1 if current else 1,
                frozen_names=self._generations.frozen_names,
                verify=self._verify,
            )
            return self._transaction

    def first_write(self, target: Target) -> None:
        """[Owner] Say on disk that an in-place update has begun, so that a crash is noticed."""
        with self._lock:
            self._generations.first_write(target)

    def replace_slot(self, slot: Slot, stripe: int, error: OSError) -> Slot:
        """[Owner] Files without the path that failed."""
        with self._lock:
            return self._generations.replace_slot(slot, stripe, error)

    def discard_slot(self, slot: Slot) -> None:
        """[Owner] Remove the files that a transaction has moved away from."""
        with self._lock:
            self._pool.drop([slot])

    def publish(self, targets: Iterable[Target], step: int, meta: Mapping[str, Any], durable: bool) -> None:
        """[Owner] The atomic commit."""
        with self._lock:
            self._version += self._landing is None
            self._generations.publish(targets, step, meta, durable)

    def land(self, landing: Landing) -> None:
        """[Owner] Commit in the background."""
        with self._lock:
            self._landing = landing
            self._version += 1
        landing.start()

    def closed(self, state: TransactionState, targets: Iterable[Target]) -> None:
        """[Owner] A transaction has ended."""
        with self._lock:
            self._transaction = None
            if state is TransactionState.COMMITTED:
                self._landing = None
            self._generations.tidy(self._generations.drop_unused_frozen)

    def flush(self) -> HandleGroup:
        """Start making the current generation durable, so that a pin some time later need not wait for the disk.

        A commit without durable=True leaves that to do. Its wait() raises StorageFault. Raises StoreError.
        """
        self.settle()
        with self._lock:
            self._require_open()
            _, sources = self._generations.pinned()
            return HandleGroup([slot.flush() for slot, _ in sources])

    def pin(self, directory: str, *, background: bool = False) -> PinnedGeneration:
        """Keep the current generation in a directory, as a checkpoint: durable, and never written again.

        On the same file system nothing is copied and the result is complete and durable at once; with `background` the
        files are linked at once, and what is left (waiting for the disk) is done while training goes on. On another
        file system the bytes are always copied and checked in the background, through a few buffers
        (stream.SCRATCH_BYTES). wait() for it; until then a crash leaves no checkpoint there. Files that a checkpoint
        shares are replaced, not rewritten, when their turn comes, which takes the space of one more generation for each
        checkpoint that is kept. Raises FileExistsError when the directory holds one already, StoreError, StorageFault,
        OSError.
        """
        self.settle()
        with self._lock:
            self._require_open()
            if self._transaction is not None and self._transaction.in_place:
                raise StoreError(
                    "an update in place (generations: 1) is open, which would write the pinned files: commit() or abort() it"
                )
            pinned_manifest, sources = self._generations.pinned()
            directory = os.path.abspath(directory)
            if any(pin.directory == directory and not pin.done() for pin in self._pins):
                raise FileExistsError(f"{directory}: a checkpoint is being copied there; name another directory")
            pinned, jobs = start_pin(directory, pinned_manifest, sources)
            slots = [slot for slot, _ in sources]
            for slot in slots:
                slot.hold()
            if not (jobs or background):
                pinned.complete(lambda pin: self._complete(pin, slots, jobs))
                return pinned
            self._pins = [pin for pin in self._pins if not pin.done()]
            self._pins.append(pinned)
            pinned.start(lambda pin: self._complete(pin, slots, jobs))
            return pinned

    def _complete(self, pinned: PinnedGeneration, slots: Sequence[Slot], jobs: Sequence[CopyJob]) -> None:
        """What a pin does once its files are linked."""
        try:
            copy_files(pinned, jobs, self._pool.io)
            linked = [slot for slot in slots if sum(job.slot is slot for job in jobs) < len(slot.files)]
            finish_pin(pinned.directory, linked)
        finally:
            with self._lock:
                for slot in slots:
                    slot.unhold()

    def restore(self, directory: str) -> GenerationInfo:
        """Make a pinned generation the current one, checked unless verify is "off".

        Its files are linked where the file system allows (and then not written again), else copied. Raises LayoutError
        when it holds other shards, IntegrityError when it is damaged; then nothing was changed.
        """
        self.settle()
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
                    self._generations.tidy(self._generations.drop_unused_frozen)
            record = self._generations.current
            if record is None:
                raise StoreError(f"{directory}: nothing was restored")
            return info_of(record)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each path's share of the current generation (of the first one before a commit), in the order of the paths; empty
        after close()."""
        with self._lock:
            return () if self._closed else self._generations.shares()

    @property
    def devices(self) -> tuple[int, ...]:
        """The device (st_dev of files, as in IOStats) under each path. Raises OSError for a path that is gone."""
        return tuple(file_device(folder) for folder in self._pool.folders)

    def restripe(self, weights: Sequence[float]) -> int:
        """Lay the generations to come out in other proportions, one weight per path as open() was given them (measured
        bandwidth, say); 0 leaves a path out.

        Nothing is copied: each generation's files are made anew when it is written anyway, and what is not written is
        carried over as always, so after as many updates as there are generations all of them have the new shares. The
        old ones stay readable; a crash leaves either. Frozen planes and the update that is open stay where they are, and
        so does a generation for whose new files there is no room when its turn comes (report() tells). New files are
        written at half speed the first time, so small changes are not worth it. The next open() goes by its own weights
        for files that it makes.

        Returns how many generations are to be laid out anew. Raises ValueError, SpaceError when they cannot fit so
        (nothing was changed then), StoreError.
        """
        with self._lock:
            self._require_open()
            return self._pool.restripe(weights)

    def wear(self) -> list[PathWear]:
        """Bytes written and read per path, since the opening and in the current step."""
        return self._pool.wear.report()

    def report(self) -> str:
        """What the store is, where it lies, what happened to it and what it has written, for people."""
        with self._lock:
            manifest = self._pool.manifest
            info = self._generations.current
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
        self._require_landed()
        if self._pool.doubt:
            raise StoreError(
                f"{self._pool.doubt}, so it is not known which generation counts: close this store, open it again"
            )
        if self._generations.torn and self._transaction is None:
            raise StoreError(
                "an in-place update was cut (generations: 1), so the state is a mixture of two steps: "
                "restore from a checkpoint, and use generations: 2 where there is room"
            )

    def _require_no_transaction(self) -> None:
        if (begun := self._transaction) is not None:
            raise StoreError(f"the transaction of generation {begun.id} is open: commit() or abort() first")

    def scratch(self, nbytes: int) -> Scratch:
        """So many bytes over all paths, in proportion to their weights, for what need not outlive the process. Close it before
        the store. Raises OSError when a disk has no room."""
        with self._lock:
            self._require_open()
            weights = [0.0 if i in self._pool.failed else path.weight for i, path in enumerate(self._pool.paths)]
            return Scratch(self._pool.folders, weights, self._pool.io, nbytes)

    def close(self, *, remove: bool = False) -> None:
        """Wait for a commit in the background, abort what is open, close the files and unlock. remove: delete this rank's files,
        and the folders that are empty then. Harmless when repeated. Raises, at the end, what went wrong with that commit."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            transaction, landing = self._transaction, self._landing
        if landing is not None:
            landing.wait()
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
        self._require_landed()

    def __enter__(self) -> "GenerationStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""The streamed update: read sub-group k+1 | Adam on k | write k-1, in a thread of its own. See also read_ahead.py.

A job is one segment whose gradient is final. Where the optimizer state is in memory the kernel runs on it in place;
where it is on NVMe the segment streams through a few staging blocks, out of the current generation into the next.

[Note: late updates] There is little to read and write under a forward pass but the update's buffers. So where the disk binds
the gradients of some groups are kept, of those that a forward pass uses near its end: their jobs come last, and the step does
not wait for them. Its commit, which goes on in the background anyway, does, and so does whoever reads what they write, above
all the next fetch of such a group: their writes are promised ([Note: promised writes] in tiers/nvme/landing.py). They are only
for what memory has no part of, so that everybody who wants to know it reads it from the store. What such a job fails of is
what the commit fails of.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lamina.aio_native import Priority
from lamina.tiers import Block, GenerationStore, Plane, Residency, Spans, Transaction, TransferHandle
from lamina.zero.adam.dtypes import KERNEL_DTYPE
from lamina.zero.adam.kernels import AdamBatch, AdamPlanes, AdamScalars, Kernels
from lamina.zero.adam.sums import UpdateSums
from lamina.zero.groups.fetched_copy import read_copy, renew_copy
from lamina.zero.groups.segment import Segment

from .core_turns import CoreTurns
from .flight import Chunk, InFlight, settle_all
from .read_ahead import Expected, ReadAhead, buffer_offsets, settle, start_reads
from .update_job import UpdateJob

ROOM = "gradient room"  # what the training thread waits for when the host tier has none for one more gradient


@dataclass(kw_only=True)
class UpdateCounters:
    """Seconds the update thread waited for reads and writes, and computed; parameter bytes that it need not read, and bytes
    that were read before their update was asked for.

    ``late_bytes``: those that were still being written when all was computed. ``room_stall_s``: seconds that the training
    thread waited for memory of gradients that were still to be used.
    """

    read_stall_s: float = 0.0
    write_stall_s: float = 0.0
    room_stall_s: float = 0.0
    adam_s: float = 0.0
    parameters: int = 0
    cached_bytes: int = 0
    ahead_bytes: int = 0
    late_bytes: int = 0


_STOP = object()
_WAKE = object()  # look again at what is wanted


@dataclass(kw_only=True)
class Updater:
    """Runs jobs in the order in which they were submitted. Errors surface in ``finish`` and ``drain`` (and stop later jobs), but
    for those of writes, which the transaction tells when it is committed."""

    kernels: Kernels
    store: GenerationStore | None
    staging: Sequence[Block]
    sub_group_numel: int
    spans: Spans
    counters: UpdateCounters = field(default_factory=UpdateCounters)

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._free = deque(self.staging)
        self._state = threading.Condition()
        self.turns = CoreTurns(self._state)
        self._open_jobs = 0
        self._queued_jobs = 0  # of the open ones, those not yet taken up
        self._unwritten = 0
        self._draining = False
        self._writes: list[TransferHandle] = []  # those under way
        self._from_homes: list[TransferHandle] = []  # of them, those out of memory that is not the updater's
        self._error: BaseException | None = None
        self._transaction: Transaction | None = None
        self._chunks: Iterator[Chunk] | None = None
        self._late: list[UpdateJob] = []  # that were taken up and are not done
        self._ahead = ReadAhead(self.store, self.sub_group_numel)
        self._submitted: list[Segment] = []
        self._ended = threading.Event()  # a join that Ctrl-C has cut takes the thread for ended ever after
        threading.Thread(target=self._work, name="lamina-update", daemon=True).start()

    # -- called by the training thread ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        with self._state:
            return self._open_jobs > 0

    def submit(self, job: UpdateJob, transaction: Transaction | None) -> None:
        with self._state:
            self._open_jobs += 1
            self._queued_jobs += 1
            self._transaction = transaction
        job.version = self.store.version if self.store is not None else 0
        self._submitted.append(job.segment)
        self._queue.put(job)

    def wait_for_a_job(self) -> bool:
        """Wait until one more job has used its gradient; False when no job is under way."""
        with self._state:
            before = self._open_jobs
            if before == 0 or self._error is not None:
                return False
        began = time.perf_counter()
        self.turns.wait_for(lambda: self._open_jobs < before or self._error is not None)
        ended = time.perf_counter()
        self.counters.room_stall_s += ended - began
        self.spans.add("stall", ROOM, began, ended)
        return self._error is None

    def finish_jobs(self) -> None:
        """Wait until every job has used its gradient, or one has failed: what went wrong is for ``finish`` to raise."""
        self.turns.wait_for(lambda: self._open_jobs == 0 or self._error is not None)

    def finish(self) -> None:
        """Wait until every job is computed and its writes are under way; raises the first error of any of them. What is still
        being written then lies in the staging blocks, nowhere else."""
        self.turns.wait_for(lambda: self._open_jobs == 0)
        with self._state:
            from_homes, self._from_homes = self._from_homes, []
            self.counters.late_bytes = sum(write.nbytes for write in self._writes if not write.done())
        error = self._take_error()
        if error is not None:
            raise error
        for handle in from_homes:
            handle.wait()

    def drain(self) -> None:
        """Wait until every job is computed and written, well or not; raises the first error of any of them."""
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """The same with that error as a value: for who drops all of it."""
        with self._state:
            self._draining = True
        self._queue.put(_WAKE)
        self.turns.wait_for(lambda: self._open_jobs == 0 and self._unwritten == 0)
        with self._state:
            self._draining = False
            self._from_homes.clear()
        return self._take_error()

    def _take_error(self) -> BaseException | None:
        with self._state:
            error, self._error = self._error, None
        return error

    def read_ahead(self) -> None:
        """The next jobs will probably come in the order of those since this was last called: begin to read the first ones'
        state from the generation that is current now."""
        order, self._submitted = self._submitted, []
        self._queue.put(Expected(order=tuple({id(segment): segment for segment in order}.values())))

    def take_counters(self) -> UpdateCounters:
        taken, self.counters = self.counters, UpdateCounters()
        return taken

    def close(self) -> None:
        """Returns when nothing touches the buffers any more, also when Ctrl-C comes meanwhile: they are given back next."""
        self._queue.put(_STOP)
        try:
            self._ended.wait()
        except BaseException:
            self._ended.wait()
            raise

    # -- the update thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._take_turns()
        finally:
            self._ended.set()

    def _take_turns(self) -> None:
        reading: deque[InFlight] = deque()
        writing: deque[InFlight] = deque()
        while True:
            try:
                if not self._turn(reading, writing):
                    return
            except BaseException as error:  # noqa: BLE001 - handed to the training thread by drain()
                self._fail(error, reading, writing)

    def _turn(self, reading: deque[InFlight], writing: deque[InFlight]) -> bool:
        """One round of the pipeline; False when the thread is to end."""
        # Jobs in memory need no staging, so the queue is looked at also when there is none. Writes under way are waited for
        # only when their buffers are needed or all are to be over: a job that comes meanwhile can be read at once.
        while self._free or len(self._ahead) or not (reading or writing):
            chunk = self._next_chunk(block=False)
            if chunk is None:
                self._ahead.go_on(self._free)
                if reading or (writing and (self._draining or self._ahead.unfinished)):
                    break
                chunk = self._next_chunk(block=True)
            if chunk is _STOP and any(flight.chunk.job.late for flight in reading):
                self._queue.put(_STOP)
                break
            if chunk is _STOP:
                settle_all(reading, writing)
                self._free.extend(self._ahead.forget())
                return False
            if isinstance(chunk, Expected):
                self._free.extend(self._ahead.forget())
                self._ahead.expect(chunk.order)
                continue
            if isinstance(chunk, Chunk):
                reading.append(self._read(chunk))
        if reading:
            self._update_next(reading, writing)
            while writing and all(handle.done() for handle in writing[0].handles):
                self._written(writing)
        elif writing:
            self._written(writing)
        return True

    def _update_next(self, reading: deque[InFlight], writing: deque[InFlight]) -> None:
        # It stays in ``reading`` until its update has succeeded, so that its buffer is not reused under a failed one's I/O.
        writing.append(self._update(reading[0]))
        reading.popleft()

    def _next_chunk(self, *, block: bool) -> object:
        """The next sub-group to stream; jobs in memory are run on the way. None: nothing to do now."""
        while True:
            if self._chunks is not None:
                chunk = next(self._chunks, None)
                if chunk is not None:
                    return chunk
                self._chunks = None
            try:
                job = self._queue.get(block)
            except queue.Empty:
                return None
            if not isinstance(job, UpdateJob):
                return job
            with self._state:
                self._queued_jobs -= 1
            if job.late:
                self._late.append(job)
            if self._error is not None:
                self._job_done(job)
            else:
                if job.in_place and job.segment.numel_in_place:
                    self._update_in_memory(job)
                self._chunks = self._cut(job)

    def _cut(self, job: UpdateJob) -> Iterator[Chunk]:
        """The sub-groups of what the store has."""
        numel = job.segment.layout.shard_numel
        starts = range(job.segment.numel_in_place, numel if job.stored else 0, self.sub_group_numel)
        job.chunks_left = len(starts)
        with self._state:
            self._unwritten += len(starts)
        if not starts:
            self._job_done(job)
        return (Chunk(job=job, begin=s, end=min(s + self.sub_group_numel, numel)) for s in starts)

    def _read(self, chunk: Chunk) -> InFlight:
        """Begin to read the chunk's planes that are on NVMe and are needed to compute, those that were not read ahead."""
        job, segment, numel = chunk.job, chunk.job.segment, chunk.end - chunk.begin
        offsets = buffer_offsets(segment, numel, from_store=job.from_store)
        early = self._ahead.take(segment, chunk.begin, chunk.end, offsets, version=job.version)
        if early is not None:
            staging, handles = early.staging, early.handles
            if early.started < job.asked_for:
                self.counters.ahead_bytes += early.nbytes
        else:
            if not self._ahead.passed(segment, chunk.begin, chunk.end):
                self._free.extend(self._ahead.forget())
            staging = self._free.popleft()
            handles = start_reads(
                self.store,
                segment,
                chunk.begin,
                chunk.end,
                staging,
                offsets,
                priority=Priority.PREFETCH,
                version=job.version,
            )
        fetching = Residency.ABSENT.fetch()
        flight = InFlight(chunk=chunk, staging=staging, offsets=offsets, handles=handles, residency=fetching)
        if Plane.PARAM in offsets and not _is_only_written(Plane.PARAM, job):
            try:
                self._read_param(flight)
            except BaseException:
                settle(handles)
                raise
        return flight

    def _read_param(self, flight: InFlight) -> None:
        """Its parameters, too: out of the fetched copy of their group where there is one."""
        chunk, segment = flight.chunk, flight.chunk.job.segment
        itemsize = segment.dtype.itemsize
        view = flight.staging.view[flight.offsets[Plane.PARAM] :][: (chunk.end - chunk.begin) * itemsize]
        if not (chunk.job.from_store or chunk.job.late) and read_copy(segment, chunk.begin, chunk.end, view):
            self.counters.cached_bytes += len(view)
        elif self.store is not None:
            where, version = chunk.begin * itemsize, chunk.job.version
            flight.handles.append(
                self.store.read(
                    segment.name, Plane.PARAM, view, offset=where, priority=Priority.PREFETCH, version=version
                )
            )

    def _update(self, flight: InFlight) -> InFlight:
        """Wait for the reads, run Adam, begin the writes."""
        chunk, job = flight.chunk, flight.chunk.job
        began = time.perf_counter()
        for handle in flight.handles:
            handle.wait()
        flight.residency = flight.residency.arrive()
        ready = time.perf_counter()
        segment, numel = job.segment, chunk.end - chunk.begin

        def address(plane: Plane) -> int:
            """Where element chunk.begin of the plane is: in the staging block or at home in memory."""
            if plane in flight.offsets:
                return flight.staging.address + flight.offsets[plane]
            home = segment.address(plane)
            itemsize = next((spec.itemsize for spec in segment.planes if spec.plane is plane), 0)
            return home + chunk.begin * itemsize if home else 0

        flight.residency = flight.residency.change()
        sums = UpdateSums(segment.planes)
        self._adam(job, chunk.begin, chunk.end, address, sums)
        handles = []
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError(f"{segment.name} has NVMe-resident state but no generation is open for it")
        for spec in segment.stored_planes:
            nbytes, where = numel * spec.itemsize, chunk.begin * spec.itemsize
            if spec.plane in flight.offsets:
                offset = flight.offsets[spec.plane]
                view = flight.staging.view[offset : offset + nbytes]
            else:  # a parameter that is cached in memory: written from there
                view = self._cached_param(segment, chunk.begin * spec.itemsize, nbytes)
            taken = sums.taken[spec.plane]
            handles.append(transaction.write(segment.name, spec.plane, view, offset=where, taken=taken))
            self._note_write(handles[-1], from_home=spec.plane not in flight.offsets)
        if job.from_store and segment.home is not None:
            self._refresh_cache(segment, flight, chunk)
        new = flight.staging.view[flight.offsets.get(Plane.PARAM, 0) :]
        if job.copy is not None and not renew_copy(segment, job.copy, chunk.begin, chunk.end, new):
            job.copy = None
        if segment.device_home is not None:
            self._copy_up(segment, chunk.begin, flight.staging.view[flight.offsets[Plane.PARAM] :], numel)
        self.counters.read_stall_s += ready - began
        self.counters.parameters += numel
        self.spans.add("nvme->host: optimizer", segment.name, flight.started, ready)
        self._computed(job)
        return replace(flight, handles=handles, residency=flight.residency.write(), started=time.perf_counter())

    def _adam(
        self, job: UpdateJob, begin: int, end: int, address: Callable[[Plane], int], sums: UpdateSums | None = None
    ) -> None:
        """Update every run that overlaps [begin, end), in one call; ``address`` gives where element begin is.
        Where the call runs: [Note: Turns]."""
        segment, gradient = job.segment, job.gradient
        itemsizes = {spec.plane: spec.itemsize for spec in segment.planes}
        bases = {plane: address(plane) for plane in itemsizes}
        grad = gradient.address + begin * gradient.dtype.itemsize
        batch = AdamBatch()
        for run in job.runs:
            first, last = max(run.begin, begin), min(run.end, end)
            if first >= last:
                continue
            at = {plane: base + (first - begin) * itemsizes[plane] for plane, base in bases.items()}
            planes = AdamPlanes(
                n=last - first,
                param=at[Plane.PARAM],
                param_dtype=KERNEL_DTYPE[segment.dtype],
                grad=grad + (first - begin) * gradient.dtype.itemsize,
                grad_dtype=KERNEL_DTYPE[gradient.dtype],
                exp_avg=at[Plane.EXP_AVG],
                exp_avg_sq=at[Plane.EXP_AVG_SQ],
                master=at.get(Plane.MASTER, 0),
                remainder=at.get(Plane.REMAINDER, 0),
                sums=sums.room(first - begin, last - first) if sums is not None else 0,
            )
            batch.add(planes, AdamScalars(run.hyper, job.grad_multiplier))
        began, ended = self.turns.run(lambda: self.kernels.adam_batch(batch))
        self.counters.adam_s += ended - began
        self.spans.add("Adam", segment.name, began, ended)

    def _update_in_memory(self, job: UpdateJob) -> None:
        segment, numel = job.segment, job.segment.numel_in_place
        self._adam(job, 0, numel, segment.address)
        if segment.device_home is not None:
            self._copy_up(segment, 0, segment.state[Plane.PARAM].view, numel)
        self.counters.parameters += numel

    def _note_write(self, handle: TransferHandle, *, from_home: bool) -> None:
        with self._state:
            self._writes = [*(write for write in self._writes if not write.done()), handle]
            if from_home:
                self._from_homes = [*(write for write in self._from_homes if not write.done()), handle]

    def _cached_param(self, segment: Segment, where: int, nbytes: int) -> memoryview:
        return segment.home_shard()[where : where + nbytes]

    def _copy_up(self, segment: Segment, begin: int, values: memoryview, numel: int) -> None:
        """Bring new parameters from host memory to their home in the accelerator's memory."""
        if segment.device is None or segment.flat is None:
            raise RuntimeError(f"{segment.name} is not at home on an accelerator")
        source = torch.frombuffer(values, dtype=segment.dtype, count=numel)
        target = segment.shard_of(segment.flat)[begin : begin + numel]
        segment.device.wait(segment.device.copy_up(target, source, segment.device.mark()))

    def _refresh_cache(self, segment: Segment, flight: InFlight, chunk: Chunk) -> None:
        itemsize = segment.dtype.itemsize
        nbytes = (chunk.end - chunk.begin) * itemsize
        offset = flight.offsets[Plane.PARAM]
        cached = self._cached_param(segment, chunk.begin * itemsize, nbytes)
        cached[:] = flight.staging.view[offset : offset + nbytes]

    def _computed(self, job: UpdateJob) -> None:
        job.chunks_left -= 1
        if job.chunks_left == 0:
            self._job_done(job)

    def _job_done(self, job: UpdateJob) -> None:
        if job.promise is not None:
            self._late.remove(job)
            job.promise.keep()
        job.done(job)
        with self._state:
            self._open_jobs -= 1
            self._state.notify_all()

    def _written(self, writing: deque[InFlight]) -> None:
        flight = writing[0]
        began = time.perf_counter()
        succeeded = settle(flight.handles)  # what went wrong the transaction tells
        ended = time.perf_counter()
        flight.residency = flight.residency.written() if succeeded else flight.residency.fail()
        self.counters.write_stall_s += ended - began
        self.spans.add("host->nvme: optimizer", flight.chunk.job.segment.name, flight.started, ended)
        writing.popleft()
        flight.residency = flight.residency.evict() if succeeded else flight.residency.drop()
        self._free.append(flight.staging)
        with self._state:
            self._unwritten -= 1
            self._state.notify_all()

    def _fail(self, error: BaseException, reading: deque[InFlight], writing: deque[InFlight]) -> None:
        """Remember the first error, let transfers end, and account for everything that will not be done. That of late jobs is
        their commit's, which tells it."""
        late, self._late = self._late, []
        for job in late:
            if job.promise is not None:
                job.promise.fail(error)
        settle_all(reading, writing)
        reading.clear()
        writing.clear()
        list(self._ahead.forget())
        self._chunks = None
        self._free = deque(self.staging)
        with self._state:
            if self._error is None and not late:
                self._error = error
            self._unwritten = 0
            self._open_jobs = self._queued_jobs
            self._state.notify_all()
        for job in late:
            job.done(job)


def _is_only_written(plane: Plane, job: UpdateJob) -> bool:
    """The fp16 parameter follows from its fp32 master: it is read only when some of it is not updated."""
    keeps_master = any(spec.plane is Plane.MASTER for spec in job.segment.planes)
    return plane is Plane.PARAM and keeps_master and job.gradient.complete

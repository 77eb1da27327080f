"""The update thread in simulated time: read sub-group k+1 | Adam on k | write k-1, by the rules of the real one."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from lamina.aio_native import Priority
from lamina.tiers.links.bandwidth import Link
from lamina.tiers.schedule.spans import Spans

from .event_queue import Channel, EventQueue, Process, Signal
from .step_model import SubGroup, UpdateModel

PASSES, ADAM = 0, 1
"""Lanes of the cores."""
READ, WRITE = 0, 1
"""Lanes of a link."""


@dataclass(kw_only=True, slots=True)
class _Flight:
    update: UpdateModel
    part: SubGroup
    is_last: bool
    transfer: Signal


class SimulatedUpdater:
    """The update thread: read sub-group k+1 | Adam on k | write k-1, as zero/step/update.py does it; what is expected next is
    read whenever there is a buffer, from the end of the step before on, without its parameters."""

    def __init__(
        self,
        *,
        queue: EventQueue,
        disk: Link | None,
        disk_channel: Channel,
        cores: Channel,
        spans: Spans,
        buffer_count: int,
        computed: Callable[[UpdateModel], None],
        has_copy: Callable[[UpdateModel], bool],
        renew: Callable[[UpdateModel], None],
    ) -> None:
        """``computed`` is called when a job has used its gradient, ``has_copy`` tells whether it can read the fetched copy of its
        group, ``renew`` has the new parameters of one sub-group written there. ``disk`` may be None where nothing streams."""
        self.queue = queue
        self.disk = disk
        self.disk_channel = disk_channel
        self.cores = cores
        self.spans = spans
        self._computed = computed
        self._has_copy = has_copy
        self._renew = renew
        self.open_jobs = 0
        self._writes: list[tuple[Signal, int]] = []  # under way, with their bytes
        self._written_by: dict[int, list[Signal]] = {}  # the same of each job
        self._jobs: deque[UpdateModel] = deque()
        self._parts: deque[tuple[UpdateModel, SubGroup, bool]] = deque()
        self._free = buffer_count
        self._submitted: dict[int, tuple[UpdateModel, float]] = {}
        self._expected: deque[SubGroup] = deque()
        self._ahead: deque[tuple[Signal, float]] = deque()
        self._stopped = False
        self._arrival = Signal()
        self._progress = Signal()
        self.begin_step()

    def begin_step(self) -> None:
        self.read_bytes = self.written_bytes = self.ahead_bytes = self.late_bytes = 0
        self.adam_s = 0.0

    # -- called by the training thread ---------------------------------------------------------------------------

    def submit(self, update: UpdateModel) -> None:
        self.open_jobs += 1
        self._jobs.append(update)
        self._written_by[id(update)] = []
        self._submitted[id(update)] = update, self.queue.now
        self._wake()

    def stop(self) -> None:
        self._stopped = True
        self._wake()

    def read_ahead(self) -> None:
        """The step is over: the next one's updates come in the same order."""
        submitted, self._submitted = self._submitted, {}
        self._expected.extend(part for update, _ in submitted.values() if update.streams for part in update.sub_groups)
        self._wake()

    def next_job_done(self) -> Signal:
        return self._progress

    def finish(self) -> Process:
        """Until all is computed."""
        while self.open_jobs:
            yield self._progress
        self.late_bytes = sum(nbytes for write, nbytes in self._writes if not write.fired)

    def written(self, update: UpdateModel) -> Process:
        """Until all of one job is written."""
        while len(self._written_by[id(update)]) < len(update.sub_groups):
            yield self._progress
        yield from self._written_by[id(update)]

    def last_writes(self) -> Process:
        """Until what is being written now is written."""
        for write, _ in list(self._writes):
            yield write

    # -- the update thread -----------------------------------------------------------------------------------------

    def run(self) -> Process:
        reading: deque[_Flight] = deque()
        writing: deque[_Flight] = deque()
        while True:
            while self._free or self._ahead or not (reading or writing):
                yield from self._run_in_memory()
                if self._parts:
                    reading.append(self._read(*self._parts.popleft()))
                    continue
                self._go_on_ahead()
                if reading or (writing and self._expected):
                    break
                if self._stopped:
                    return
                self._arrival = Signal()
                yield self._arrival
            if reading:
                writing.append((yield from self._update(reading.popleft())))
                while writing and writing[0].transfer.fired:
                    writing.popleft()
                    self._free += 1
            elif writing:
                yield writing[0].transfer
                writing.popleft()
                self._free += 1

    def _go_on_ahead(self) -> None:
        while self._free and self._expected:
            part = self._expected.popleft()
            self._free -= 1
            read = self._start_read(part.read_bytes - part.param_bytes, Priority.WRITE_BACK)
            self._ahead.append((read, self.queue.now))

    def _run_in_memory(self) -> Process:
        """Take up the next jobs until one streams; those in memory are computed on the way."""
        while not self._parts and self._jobs:
            update = self._jobs.popleft()
            if update.streams and update.sub_groups:
                last = len(update.sub_groups) - 1
                self._parts.extend((update, part, index == last) for index, part in enumerate(update.sub_groups))
                continue
            for part in update.sub_groups:
                yield self._adam(part)
            self._job_done(update)

    def _read(self, update: UpdateModel, part: SubGroup, is_last: bool) -> _Flight:
        copied = part.param_bytes if self._has_copy(update) else 0
        self.read_bytes += part.read_bytes - copied
        if self._ahead:
            transfer, started = self._ahead.popleft()
            if started < self._submitted[id(update)][1]:
                self.ahead_bytes += part.read_bytes - part.param_bytes
            if part.param_bytes > copied:
                transfer = _both(self.queue, transfer, self._start_read(part.param_bytes, Priority.PREFETCH))
        else:
            self._free -= 1
            if self._expected:
                self._expected.popleft()
            transfer = self._start_read(part.read_bytes - copied, Priority.PREFETCH)
        self._note("nvme->host: optimizer", update.name, part.read_bytes - copied, transfer)
        return _Flight(update=update, part=part, is_last=is_last, transfer=transfer)

    def _start_read(self, nbytes: int, priority: Priority) -> Signal:
        if not nbytes or self.disk is None:
            return _fired(self.queue.now)
        seconds, latency = self.disk.read_s(nbytes), self.disk.read.latency_s
        return self.disk_channel.serve(READ, seconds, priority=priority, latency_s=latency)

    def _update(self, flight: _Flight) -> Generator[Signal, None, _Flight]:
        yield flight.transfer
        began = self.queue.now
        yield self._adam(flight.part)
        self.spans.add("Adam", flight.update.name, began, self.queue.now)
        self._renew(flight.update)
        self.written_bytes += flight.part.write_bytes
        if flight.part.write_bytes and self.disk is not None:
            seconds, latency = self.disk.write_s(flight.part.write_bytes), self.disk.write.latency_s
            written = self.disk_channel.serve(WRITE, seconds, priority=Priority.WRITE_BACK, latency_s=latency)
        else:
            written = _fired(self.queue.now)
        under_way = ((write, nbytes) for write, nbytes in self._writes if not write.fired)
        self._writes = [*under_way, (written, flight.part.write_bytes)]
        self._written_by[id(flight.update)].append(written)
        self._note("host->nvme: optimizer", flight.update.name, flight.part.write_bytes, written)
        if flight.is_last:
            self._job_done(flight.update)
        return _Flight(update=flight.update, part=flight.part, is_last=flight.is_last, transfer=written)

    def _note(self, lane: str, name: str, nbytes: int, transfer: Signal) -> None:
        """A span that ends with the transfer, where there is one."""
        began = self.queue.now
        if nbytes and self.spans.enabled:
            transfer.when_fired(lambda: self.spans.add(lane, name, began, self.queue.now))

    def _adam(self, part: SubGroup) -> Signal:
        self.adam_s += part.adam_s
        return self.cores.serve(ADAM, part.adam_s)

    def _job_done(self, update: UpdateModel) -> None:
        self._computed(update)
        self.open_jobs -= 1
        self._notify()

    def _wake(self) -> None:
        if not self._arrival.fired:
            self._arrival.fire(self.queue.now)

    def _notify(self) -> None:
        before, self._progress = self._progress, Signal()
        before.fire(self.queue.now)


def _both(queue: EventQueue, first: Signal, second: Signal) -> Signal:
    """Fires with the later of the two."""
    done = Signal()
    first.when_fired(lambda: second.when_fired(lambda: done.fire(queue.now)))
    return done


def _fired(now: float) -> Signal:
    signal = Signal()
    signal.fire(now)
    return signal

"""Carrying out a trial: keeps a queue of large requests full and counts what is moved while it runs steadily.

The engine splits requests into blocks and keeps `queue_depth` of them with the kernel by itself; requests here span
several blocks so that Python has little to do, and enough of them are queued that the engine never runs dry.
"""

import contextlib
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from lamina.aio_native import AlignedBuffer, AsyncIO, AsyncIOWarning, File, Handle, IOStats

from .points import MIB, Measured, Point, Trial, Workload

QUEUES = 4
"""Times the bytes in flight that a trial moves at least."""
WARM_SHARE = 0.15
PAGE = 4096
RANDOM_BYTES = 8 * MIB
MAX_THREADS = 64
FILL_DEPTH = 32
FILL_STEP = 16 * MIB
FILL_QUEUE = 4
LEAST_QUEUED = MIB
"""Bytes queued at once, at least, so that small blocks are split by the engine and not by Python."""
REQUESTS = 8
"""Requests queued at once, at most; together about twice what may be in flight."""


def fill_incompressible(memory: memoryview) -> None:
    """Random bytes, repeated with every page marked differently: neither compression nor deduplication finds anything."""
    base = memoryview(os.urandom(min(RANDOM_BYTES, len(memory))))
    for begin in range(0, len(memory), len(base)):
        part = memory[begin : begin + len(base)]
        part[:] = base[: len(part)]
    pages = np.frombuffer(memory[: len(memory) // PAGE * PAGE], dtype=np.uint64).reshape(-1, PAGE // 8)
    pages[:, 0] ^= np.arange(1, len(pages) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def num_threads(point: Point) -> int:
    """Workers of the threads backend for a point: one for each piece in flight, within reason."""
    return min(point.queue_depth, MAX_THREADS)


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Files of equal size that hold the data of a path for one process."""

    paths: tuple[Path, ...]
    file_bytes: int
    direct: bool | None = None
    """None: direct where it can be had."""


@dataclass(frozen=True, kw_only=True)
class Created:
    """What creating the files showed."""

    direct: bool
    reason: str
    file_system: str
    alignment: int
    preallocated: bool
    file_bytes: int
    """Of each file; less than was asked for where writing them took too long."""
    first_write: float
    """Bytes per second of the first write to the fresh files."""
    written_bytes: int
    notes: tuple[str, ...]


def create_files(
    files: FileSet,
    memory: memoryview,
    *,
    backend: str,
    check: Callable[[], None],
    most_s: float = math.inf,
    least_bytes: int = 0,
) -> Created:
    """Make, preallocate and fill the files; the first pass over fresh disk space is timed.

    After most_s seconds no more is written, and the files stay as long as they are then, but at least least_bytes each.
    Raises OSError: ENOSPC when the disk is full, before or while it is written.
    """
    with _noted() as notes, _engine(backend, MIB, FILL_DEPTH, FILL_DEPTH) as io:
        opened = [
            io.open(path, create=True, exclusive=True, size=files.file_bytes, direct=files.direct)
            for path in files.paths
        ]
        began = time.perf_counter()
        file_bytes = _fill(io, opened, files.file_bytes, memory, check, began + most_s, least_bytes)
        seconds, written, found = time.perf_counter() - began, file_bytes * len(opened), opened[0]
    if file_bytes < files.file_bytes:
        for path in files.paths:
            os.truncate(path, file_bytes)
        notes.append(
            f"the files are {written} bytes in all instead of {files.file_bytes * len(opened)}: "
            f"writing more would have taken longer than {most_s:.0f} s"
        )
    return Created(
        direct=found.direct,
        reason=found.reason,
        file_system=found.file_system,
        alignment=found.alignment,
        preallocated=found.preallocated,
        file_bytes=file_bytes,
        first_write=written / seconds,
        written_bytes=written,
        notes=tuple(notes),
    )


def _fill(
    io: AsyncIO,
    opened: Sequence[File],
    nbytes: int,
    memory: memoryview,
    check: Callable[[], None],
    end: float,
    least_bytes: int,
) -> int:
    """Write the files side by side, so that all are equally long when the time is over; bytes of each."""
    step = min(len(memory), FILL_STEP)
    queue: deque[tuple[Handle, int]] = deque()
    with _told_once(queue):
        for offset in range(0, nbytes, step):
            if time.perf_counter() > end and offset >= least_bytes:
                nbytes = offset
                break
            length = min(step, nbytes - offset)
            begin = offset % len(memory) if offset % len(memory) + length <= len(memory) else 0
            for file in opened:
                check()
                queue.append((io.write(file, memory[begin : begin + length], offset), 0))
                if len(queue) >= FILL_QUEUE:
                    queue.popleft()[0].wait()
        while queue:
            queue.popleft()[0].wait()
    return nbytes


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """Collects the warnings of the I/O layer as sentences instead of printing them."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AsyncIOWarning)
        yield notes
        for warning in caught:
            if str(warning.message) not in notes:
                notes.append(str(warning.message))


def _engine(backend: str, block_bytes: int, depth: int, threads: int) -> AsyncIO:
    return AsyncIO(
        backend=cast(Any, backend),
        block_bytes=block_bytes,
        queue_depth=depth,
        max_inflight_bytes=block_bytes
        * depth,  # the default keeps less in flight, and the depth would not be what it says
        num_threads=threads,
        inline_bytes=0,  # a waiting thread that helps out would be one more than the depth says
    )


@contextlib.contextmanager
def _told_once(queue: "deque[tuple[Handle, int]]") -> Iterator[None]:
    """After an error the requests that are still queued are dropped, and their own failures are not told as well."""
    try:
        yield
    except BaseException:
        for handle, _ in queue:
            handle.cancel()
        for handle, _ in queue:
            with contextlib.suppress(OSError):
                handle.wait()
        raise


class Bench:
    """Buffers and files of one process; run() carries out trials. A context manager.

    `check` is called between requests and may raise, so that a signal ends a trial soon.
    """

    def __init__(
        self,
        files: FileSet,
        *,
        buffer_bytes: int,
        huge_pages: bool | None = None,
        read_share: float = 0.5,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.files = files
        self.read_share = read_share
        self.check = check
        self.notes: list[str] = []
        self.buffer = AlignedBuffer(buffer_bytes, huge_pages=huge_pages)
        fill_incompressible(self.buffer.view)

    @property
    def page_kind(self) -> str:
        """Pages of the buffers."""
        return self.buffer.page_kind

    def close(self) -> None:
        """Give the buffers back."""
        self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, trial: Trial, *, span_bytes: int | None = None) -> Measured:
        """Measure. span_bytes: keep to the first bytes of each file.

        Raises AsyncIOError with path and offset when a transfer fails.
        """
        began = time.perf_counter()
        point = trial.point
        with _noted() as notes, _engine(point.backend, point.block_bytes, point.queue_depth, num_threads(point)) as io:
            paths = self.files.paths[: point.files]
            opened = [io.open(path, writable=True, direct=self.files.direct) for path in paths]
            flow = _Flow(
                io, opened, self.buffer.view, trial, self._share(trial.workload), self._span(span_bytes, point)
            )
            io.register(self.buffer.view[: flow.used_bytes])
            elapsed, first, last = flow.steady(trial.seconds, self.check)
        self.notes += [note for note in notes if note not in self.notes]
        read, write = last.bytes_read - first.bytes_read, last.bytes_written - first.bytes_written
        return Measured(
            trial=trial,
            read=read / elapsed,
            write=write / elapsed,
            latency_s=_latency(first, last),
            depth=max((device.mean_depth for device in last.devices), default=0.0),
            cost_s=time.perf_counter() - began,
        )

    def _share(self, workload: Workload) -> float:
        return {Workload.READ: 1.0, Workload.WRITE: 0.0, Workload.MIX: self.read_share}[workload]

    def _span(self, asked: int | None, point: Point) -> int:
        span = self.files.file_bytes if asked is None else min(asked, self.files.file_bytes)
        return max(point.block_bytes, span // point.block_bytes * point.block_bytes)


def _latency(first: IOStats, last: IOStats) -> float:
    """Mean time of a piece between two readings of the counters."""
    totals = [
        (sum(d.read.latency_s + d.write.latency_s for d in s.devices),
         sum(d.read.operations + d.write.operations for d in s.devices))
        for s in (first, last)
    ]  # fmt: skip
    pieces = totals[1][1] - totals[0][1]
    return (totals[1][0] - totals[0][0]) / pieces if pieces else 0.0


class _Flow:
    """A stream of requests over the files, each in its own part of the buffer, sequential in every file and direction."""

    def __init__(
        self, io: AsyncIO, opened: Sequence[File], memory: memoryview, trial: Trial, read_share: float, span: int
    ) -> None:
        self._io, self._files, self._memory = io, opened, memory
        self._read_share = read_share
        self._span = span
        point = trial.point
        self._inflight_bytes = point.inflight_bytes
        block = point.block_bytes
        most = min(len(memory), max(2 * point.inflight_bytes, LEAST_QUEUED), 2 * span * len(opened)) // block
        # At least two requests, or the queue runs dry between one and the next.
        self._slots = max(1, min(REQUESTS, most))
        self._length = min(span, max(1, most // self._slots) * block)
        self.used_bytes = self._slots * self._length
        self._count = [0, 0]
        self._issued = 0
        self._queue: deque[tuple[Handle, int]] = deque()

    def steady(self, seconds: float, check: Callable[[], None]) -> tuple[float, IOStats, IOStats]:
        """Run for a warm-up and at least `seconds`: seconds counted, counters at both ends.

        Large pieces come in bursts as long as the queue, so that several queues' worth must pass for a fair figure.
        """
        with _told_once(self._queue):
            for slot in range(self._slots):
                self._issue(slot)
            self._run(time.perf_counter() + max(0.01, WARM_SHARE * seconds), 0, check)
            first, began = self._io.stats(), time.perf_counter()
            self._run(began + seconds, QUEUES * self._inflight_bytes, check)
            last, ended = self._io.stats(), time.perf_counter()
            while self._queue:
                self._queue.popleft()[0].wait()
        return ended - began, first, last

    def _run(self, end: float, nbytes: int, check: Callable[[], None]) -> None:
        """Until `end`, and until `nbytes` have been moved; at least one request is waited for."""
        moved = 0
        while True:
            handle, slot = self._queue.popleft()
            moved += handle.wait()
            check()
            self._issue(slot)
            if moved >= nbytes and time.perf_counter() >= end:
                return

    def _issue(self, slot: int) -> None:
        # The share of reads so far decides what comes next: the ratio holds over any stretch of requests.
        reading = self._count[0] < self._read_share * (self._issued + 1) - 1e-9
        direction = 0 if reading else 1
        number = self._count[direction]
        self._count[direction] += 1
        self._issued += 1
        file = self._files[number % len(self._files)]
        per_file = self._span // self._length
        # In a mix the two directions work on different halves of the file.
        shift = per_file // 2 if direction else 0
        offset = (number // len(self._files) + shift) % per_file * self._length
        part = self._memory[slot * self._length : (slot + 1) * self._length]
        move = self._io.read if reading else self._io.write
        self._queue.append((move(file, part, offset), slot))

"""Token buckets under the I/O interface: transfers are right, but the disks seem to have given rates."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina.aio_native import AsyncIO, DeviceStats, DirectionStats, IOStats, Read


class HandClock:
    """Stands for the module ``time`` where a test says how time passes: only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ThrottledHandle:
    """A native handle that is not done before its bytes could have passed."""

    def __init__(self, real: Any, ready: float) -> None:
        self._real = real
        self._ready = ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def done(self) -> bool:
        return time.monotonic() >= self._ready and self._real.done()

    def wait(self, timeout: float | None = None) -> int:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._real.wait(timeout)


class _Lane:
    """One direction of a bucket: bytes and seconds so far, and what of them while nothing went the other way."""

    def __init__(self) -> None:
        self.until = 0.0  # when the last of what was asked for will have passed
        self.nbytes = self.alone_bytes = 0
        self.busy_s = self.alone_s = 0.0


class Bucket:
    """Half duplex: reads and writes draw on it, in the order in which they are submitted.

    ``read_rate`` and ``write_rate`` (bytes per second) may be changed at any time. ``busy_s``: how long it has been drawn on.
    """

    def __init__(self, *, read_rate: float, write_rate: float) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._counted_to = 0.0
        self._under_way: deque[tuple[float, _Lane, int]] = deque()
        self.read_rate, self.write_rate = read_rate, write_rate
        self._busy_s = 0.0
        self.reads, self.writes = _Lane(), _Lane()

    def slow_down(self, factor: float, *, writing: float | None = None) -> None:
        """From now on so many times slower; ``writing``: writes so many times instead."""
        with self._lock:
            self.read_rate /= factor
            self.write_rate /= factor if writing is None else writing

    @property
    def busy_s(self) -> float:
        with self._lock:
            if self._under_way:
                self._count(time.monotonic())
            return self._busy_s

    def take(self, read_bytes: int, written_bytes: int, *, waits: bool = True) -> float:
        """When so many bytes will have passed, on the clock of time.monotonic(). ``waits``: False has them passed at once."""
        with self._lock:
            for lane, nbytes, rate in (
                (self.reads, read_bytes, self.read_rate),
                (self.writes, written_bytes, self.write_rate),
            ):
                if nbytes:
                    now = time.monotonic() if waits else self._free_at
                    self._count(now)
                    self._free_at = lane.until = max(self._free_at, now) + nbytes / rate
                    self._under_way.append((lane.until, lane, nbytes))
            if not waits:
                self._count(self._free_at)
            return self._free_at

    def _count(self, now: float) -> None:
        """Account for what happened until now, as a device's counters do."""
        for lane, other in ((self.reads, self.writes), (self.writes, self.reads)):
            lane.busy_s += max(0.0, min(now, lane.until) - self._counted_to)
            lane.alone_s += max(0.0, min(now, lane.until) - max(self._counted_to, other.until))
        self._busy_s += max(0.0, min(now, self._free_at) - self._counted_to)
        self._counted_to = max(now, self._counted_to)
        while self._under_way and self._under_way[0][0] <= now:
            end, lane, nbytes = self._under_way.popleft()
            other = self.writes if lane is self.reads else self.reads
            lane.nbytes += nbytes
            lane.alone_bytes += nbytes if other.until < end else 0

    def stats(self, real: DeviceStats) -> DeviceStats:
        """A device's counters with this bucket's times and bytes."""
        busy_s = self.busy_s
        return replace(
            real, busy_s=busy_s, read=_counted(real.read, self.reads), write=_counted(real.write, self.writes)
        )


def _counted(real: DirectionStats, lane: _Lane) -> DirectionStats:
    return replace(real, bytes=lane.nbytes, busy_s=lane.busy_s, alone_s=lane.alone_s, alone_bytes=lane.alone_bytes)


class DisksIO:
    """Each folder (and what lies in it) a disk of its own with a bucket of its own; files elsewhere are refused.

    ``waits``: False counts the time that the disks would take, and lets nobody wait.
    """

    def __init__(self, io: AsyncIO, disks: Mapping[Path, Bucket], *, waits: bool = True) -> None:
        self._io = io
        self.disks = dict(disks)
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

    def __enter__(self) -> "DisksIO":
        return self

    def __exit__(self, *exc: object) -> None:
        self._io.close()

    def _bucket(self, file: Any) -> Bucket:
        return next(bucket for folder, bucket in self.disks.items() if Path(file.path).is_relative_to(folder))

    def _throttled(self, real: Any, ready: float) -> Any:
        return ThrottledHandle(real, ready) if self._waits else real

    def stats(self) -> IOStats:
        """The disks are devices 0, 1, …, each as busy as its bucket was drawn on."""
        real = self._io.stats()
        if not real.devices:
            return real
        one = real.devices[0]
        return replace(
            real,
            devices=tuple(
                replace(bucket.stats(one), device=number) for number, bucket in enumerate(self.disks.values())
            ),
        )

    def read(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._bucket(file).take(memoryview(buffer).nbytes, 0, waits=self._waits)
        return self._throttled(self._io.read(file, buffer, offset, **options), ready)

    def write(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._bucket(file).take(0, memoryview(buffer).nbytes, waits=self._waits)
        return self._throttled(self._io.write(file, buffer, offset, **options), ready)

    def submit(self, requests: Any, **options: Any) -> Any:
        ready = 0.0
        for request in requests:
            nbytes = memoryview(request.buffer).nbytes
            taken = (nbytes, 0) if isinstance(request, Read) else (0, nbytes)
            ready = max(ready, self._bucket(request.file).take(*taken, waits=self._waits))
        return self._throttled(self._io.submit(requests, **options), ready)


class ThrottledIO(DisksIO):
    """A single disk, wherever the files lie: the device of the first. Bytes count when they have passed, as seconds do."""

    def __init__(self, io: AsyncIO, *, read_rate: float, write_rate: float) -> None:
        self.disk = Bucket(read_rate=read_rate, write_rate=write_rate)
        super().__init__(io, {Path("/"): self.disk})

    def _bucket(self, file: Any) -> Bucket:
        return self.disk

    def stats(self) -> IOStats:
        real = self._io.stats()
        return replace(real, devices=tuple(self.disk.stats(one) for one in real.devices[:1]))

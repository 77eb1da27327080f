"""Token buckets under the I/O interface: transfers are right, but the disks seem to have given rates."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina.aio_native import AsyncIO, IOStats, Read


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


class Bucket:
    """Half duplex: reads and writes draw on it, in the order in which they are submitted.

    ``read_rate`` and ``write_rate`` (bytes per second) may be changed at any time. ``busy_s``: how long it was drawn on.
    """

    def __init__(self, *, read_rate: float, write_rate: float) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.read_rate, self.write_rate = read_rate, write_rate
        self.busy_s = 0.0
        self.read_bytes = self.written_bytes = 0

    def slow_down(self, factor: float, *, writing: float | None = None) -> None:
        """From now on so many times slower; ``writing``: writes so many times instead."""
        with self._lock:
            self.read_rate /= factor
            self.write_rate /= factor if writing is None else writing

    def take(self, read_bytes: int, written_bytes: int) -> float:
        """When so many bytes will have passed, on the clock of time.monotonic()."""
        with self._lock:
            seconds = read_bytes / self.read_rate + written_bytes / self.write_rate
            self.read_bytes += read_bytes
            self.written_bytes += written_bytes
            self.busy_s += seconds
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            return self._free_at


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
                replace(
                    one,
                    device=number,
                    busy_s=bucket.busy_s,
                    read=replace(one.read, bytes=bucket.read_bytes),
                    write=replace(one.write, bytes=bucket.written_bytes),
                )
                for number, bucket in enumerate(self.disks.values())
            ),
        )

    def read(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._bucket(file).take(memoryview(buffer).nbytes, 0)
        return self._throttled(self._io.read(file, buffer, offset, **options), ready)

    def write(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._bucket(file).take(0, memoryview(buffer).nbytes)
        return self._throttled(self._io.write(file, buffer, offset, **options), ready)

    def submit(self, requests: Any, **options: Any) -> Any:
        ready = 0.0
        for request in requests:
            nbytes = memoryview(request.buffer).nbytes
            taken = (nbytes, 0) if isinstance(request, Read) else (0, nbytes)
            ready = max(ready, self._bucket(request.file).take(*taken))
        return self._throttled(self._io.submit(requests, **options), ready)


class ThrottledIO(DisksIO):
    """A single disk, wherever the files lie: the device of the first. Bytes count when they are submitted, as seconds do."""

    def __init__(self, io: AsyncIO, *, read_rate: float, write_rate: float) -> None:
        self.disk = Bucket(read_rate=read_rate, write_rate=write_rate)
        super().__init__(io, {Path("/"): self.disk})

    def _bucket(self, file: Any) -> Bucket:
        return self.disk

    def stats(self) -> IOStats:
        real, disk = self._io.stats(), self.disk
        return replace(
            real,
            devices=tuple(
                replace(
                    one,
                    busy_s=disk.busy_s,
                    read=replace(one.read, bytes=disk.read_bytes),
                    write=replace(one.write, bytes=disk.written_bytes),
                )
                for one in real.devices[:1]
            ),
        )

"""A token bucket under the I/O interface: transfers are right, but the disk seems to have a given rate."""

import threading
import time
from dataclasses import replace
from typing import Any

from lamina.aio_native import AsyncIO, IOStats, Read


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


class ThrottledIO:
    """Half duplex: reads and writes draw on one bucket, in the order in which they are submitted.

    ``read_rate`` and ``write_rate`` (bytes per second) may be changed at any time. ``busy_s``: how long the bucket was drawn on.
    """

    def __init__(self, io: AsyncIO, *, read_rate: float, write_rate: float) -> None:
        self._io = io
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.read_rate, self.write_rate = read_rate, write_rate
        self.busy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

    def slow_down(self, factor: float) -> None:
        """From now on so many times slower."""
        with self._lock:
            self.read_rate, self.write_rate = self.read_rate / factor, self.write_rate / factor

    def _ready(self, seconds: float) -> float:
        with self._lock:
            self.busy_s += seconds
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            return self._free_at

    def stats(self) -> IOStats:
        """As if the one disk had been busy for as long as the bucket was drawn on."""
        real = self._io.stats()
        return replace(real, devices=tuple(replace(device, busy_s=self.busy_s) for device in real.devices))

    def read(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._ready(memoryview(buffer).nbytes / self.read_rate)
        return ThrottledHandle(self._io.read(file, buffer, offset, **options), ready)

    def write(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        ready = self._ready(memoryview(buffer).nbytes / self.write_rate)
        return ThrottledHandle(self._io.write(file, buffer, offset, **options), ready)

    def submit(self, requests: Any, **options: Any) -> Any:
        seconds = sum(
            memoryview(request.buffer).nbytes / (self.read_rate if isinstance(request, Read) else self.write_rate)
            for request in requests
        )
        ready = self._ready(seconds)
        return ThrottledHandle(self._io.submit(requests, **options), ready)

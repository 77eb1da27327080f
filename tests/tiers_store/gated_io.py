"""A shim under the I/O interface whose writes end only when they are let go on."""

import threading
from typing import Any

from lamina.aio_native import AsyncIO, AsyncIOError


class GatedHandle:
    """A native handle that is not done before the gate is open; ``fault`` is then its outcome, if there is one."""

    def __init__(self, start: Any, gate: "GatedIO") -> None:
        self._start = start
        self._gate = gate
        self._real: Any = None
        self._lock = threading.Lock()
        self.error: AsyncIOError | None = None

    def done(self) -> bool:
        return self._gate.open_event.is_set() and (self._begin() is None or self._real.done())

    def wait(self, timeout: float | None = None) -> int:
        if not self._gate.open_event.wait(timeout):
            raise TimeoutError
        real = self._begin()
        if real is None:
            assert self.error is not None
            raise self.error
        return int(real.wait(timeout))

    def _begin(self) -> Any:
        with self._lock:
            if self._gate.fault is not None:
                self.error = self._gate.fault
            elif self._real is None:
                self._real = self._start()
            return self._real


class GatedIO:
    """close(): writes started from now on stay under way until open(), which may have them fail."""

    def __init__(self, io: AsyncIO) -> None:
        self._io = io
        self.open_event = threading.Event()
        self.open_event.set()
        self.fault: AsyncIOError | None = None

    def close(self) -> None:
        self.open_event.clear()
        self.fault = None

    def open_gate(self, fault: AsyncIOError | None = None) -> None:
        self.fault = fault
        self.open_event.set()

    def write(self, *arguments: Any, **options: Any) -> Any:
        return self._gated(lambda: self._io.write(*arguments, **options))

    def submit(self, requests: Any, **options: Any) -> Any:
        return self._gated(lambda: self._io.submit(requests, **options))

    def _gated(self, start: Any) -> Any:
        return start() if self.open_event.is_set() else GatedHandle(start, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

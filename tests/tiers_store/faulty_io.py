"""A shim under the I/O interface that makes one chosen call go wrong."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

from lamina.aio_native import AsyncIO, AsyncIOError, Read, ShortIOError, Write


class FaultyHandle:
    """A native handle whose outcome is another one than the disk's."""

    def __init__(self, real: Any, error: AsyncIOError | None, delay_s: float) -> None:
        self._real = real
        self._fault = error
        self._ready = time.monotonic() + delay_s
        self.error: AsyncIOError | None = None

    def done(self) -> bool:
        return time.monotonic() >= self._ready and (self._real is None or self._real.done())

    def wait(self, timeout: float | None = None) -> int:
        if self._real is not None:
            self._real.wait(timeout)
        time.sleep(max(0.0, self._ready - time.monotonic()))
        if self._fault is not None and self.error is None:
            self.error = self._fault
            raise self.error
        return 0 if self.error else self._real.wait()


class FaultyIO:
    """Counts the transfers and fails one of them.

    arm(kind, number): the number-th transfer from now on goes wrong: "eio", "enospc" (half of it was done), "short", "refused"
    (cannot be started), "delayed" (20 ms late, but right). only: "read", "write", "fsync" or None for all are counted.
    """

    def __init__(self, io: AsyncIO) -> None:
        self._io = io
        self._lock = threading.Lock()
        self.arm(None, -1)

    def arm(self, kind: str | None, number: int, *, only: str | None = None) -> None:
        self.kind, self.number, self.only = kind, number, only
        self.count = 0
        self.hit = ""
        self.hit_path = ""

    def disarm(self) -> None:
        """Nothing fails any more; what was hit is still told."""
        self.kind = None

    def open(self, path: str, **options: Any) -> Any:
        return self._io.open(path, **options)

    def read(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        return self._call("read", file.path, lambda: self._io.read(file, buffer, offset, **options), lambda: None)

    def write(self, file: Any, buffer: Any, offset: int = 0, **options: Any) -> Any:
        def half() -> Any:
            view = memoryview(buffer)
            return self._io.write(file, view[: len(view) // 2], offset, **options)

        return self._call("write", file.path, lambda: self._io.write(file, buffer, offset, **options), half)

    def submit(self, requests: list[Read | Write], **options: Any) -> Any:
        name = "read" if isinstance(requests[0], Read) else "write"

        def half() -> Any:
            return self._io.submit(requests[: len(requests) // 2], **options) if name == "write" else None

        return self._call(name, requests[0].file.path, lambda: self._io.submit(requests, **options), half)

    def fsync(self, file: Any, **options: Any) -> Any:
        return self._call("fsync", file.path, lambda: self._io.fsync(file, **options), lambda: None)

    def _call(self, name: str, path: str, start: Callable[[], Any], half: Callable[[], Any]) -> Any:
        with self._lock:
            if self.only not in (None, name):
                return start()
            self.count += 1
            if self.count - 1 != self.number or self.kind is None:
                return start()
            self.hit, self.hit_path = name, path
        if self.kind == "delayed":
            return FaultyHandle(start(), None, 0.02)
        if self.kind == "refused":
            raise AsyncIOError(errno.EIO, f"{name} of {path} refused", path=path)
        if self.kind == "short":
            fault: AsyncIOError = ShortIOError(
                errno.ENODATA, f"{name} of {path} came back short", path=path, wanted=2, got=1
            )
        else:
            number = errno.EIO if self.kind == "eio" else errno.ENOSPC
            fault = AsyncIOError(number, f"{name} of {path} failed: {errno.errorcode[number]}", path=path)
        return FaultyHandle(half(), fault, 0.0)

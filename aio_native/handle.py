"""The future of a transfer. It owns the memory that the transfer uses."""

import errno
import math
import time
from typing import Any

from .core import Core, warn_unseen
from .errors import AsyncIOError, CancelledIOError, ShortIOError, errno_name
from .request import Operation

NEVER = -1
LONGEST_NS = (1 << 62) - 1


class Handle:
    """One submitted transfer. `nbytes` is what it moves when all goes well."""

    __slots__ = ("__weakref__", "_core", "_extents", "_owned", "_raise", "_result", "_transfer", "error", "nbytes")

    def __init__(self, core: Core, transfer: Any, extents: tuple[Any, ...], owned: Any, nbytes: int) -> None:
        """extents: (path, operation, offset, nbytes) of each request. owned: kept alive until the transfer is done."""
        self._core = core
        self._transfer = core.ffi.gc(transfer, core.lib.lamina_transfer_release)
        self._extents = extents
        self._owned = owned
        self._result: int | None = None
        self._raise = False
        self.error: AsyncIOError | None = None
        """The failure, once the transfer is known to be done."""
        self.nbytes = nbytes
        core.keep(self)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the transfer is done and returns the bytes moved.

        A failure is raised by the first wait() that sees it; after that, wait() returns the bytes that did move and `error`
        holds the failure. Raises TimeoutError when `timeout` (seconds) is over first: the transfer goes on.
        """
        if self._result is None:
            self._wait_native(timeout)
            self.settle()
        if self._raise:
            with self._core.lock:
                mine, self._raise = self._raise, False
            if mine and self.error is not None:
                raise self.error
        return self._result or 0

    def _wait_native(self, timeout: float | None) -> None:
        lib, transfer = self._core.lib, self._transfer
        if timeout is None:
            while rc := lib.lamina_transfer_wait(transfer, NEVER):
                if rc == -errno.EPERM:
                    self._core.check()
                # else a signal: its Python handler runs here, and may raise
            return
        if math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds, not nan")
        end = time.monotonic() + max(timeout, 0.0)
        while True:
            left = max(0.0, end - time.monotonic())
            rc = lib.lamina_transfer_wait(transfer, int(min(left * 1e9, LONGEST_NS)))
            if rc == 0:
                return
            if rc == -errno.EPERM:
                self._core.check()
            if rc == -errno.ETIMEDOUT:
                raise TimeoutError(errno.ETIMEDOUT, f"not done after {timeout} s: {self._describe(0)}")

    def done(self) -> bool:
        """Whether the transfer has ended, well or not; never waits. True also lets go of its memory."""
        if self._result is None:
            if not self.native_done():
                return False
            self.settle()
        return True

    def cancel(self) -> bool:
        """Starts no more of it. True: wait() will raise CancelledIOError (unless it failed by itself);
        False: all of it had been started, and it ends as if nothing had been asked."""
        if self._result is not None:
            return False
        self._core.check()
        return bool(self._core.lib.lamina_transfer_cancel(self._transfer))

    def native_done(self) -> bool:
        return bool(self._core.lib.lamina_transfer_done(self._transfer))

    def settle(self) -> None:
        """Takes over the outcome of a transfer that has ended; idempotent."""
        core = self._core
        moved, error = int(core.lib.lamina_transfer_bytes(self._transfer)), None
        if moved < 0:
            result = core.ffi.new("struct lamina_result *")
            core.lib.lamina_transfer_result(self._transfer, result)
            moved, error = int(result.bytes), self._failure(result)
        with core.lock:
            if self._result is not None:
                return
            self.error = error
            self._raise = error is not None
            self._result = moved
            self._owned = None
            core.forget(self)

    def _describe(self, index: int) -> str:
        if not self._extents:
            return "nothing"
        path, operation, offset, nbytes = self._extents[index]
        name = Operation(operation).name.lower()
        return f"{name} of {path}" + (f" at offset {offset}, {nbytes} bytes" if operation < Operation.FSYNC else "")

    def _failure(self, result: Any) -> AsyncIOError:
        number, index = int(result.error), int(result.extent)
        path, operation, offset, _ = self._extents[index]
        kind: type[AsyncIOError] = AsyncIOError
        reason = errno_name(number)
        if number == 0:
            number, kind, reason = errno.ENODATA, ShortIOError, "ENODATA (the file ends there)"
        elif number == errno.ECANCELED:
            kind = CancelledIOError
        what = f"{Operation(operation).name.lower()} of {path} failed"
        if operation < Operation.FSYNC:
            what += f" at offset {offset}: wanted {result.wanted} bytes, got {result.got}"
        return kind(
            number, f"{what}: {reason}", path=path, offset=offset, wanted=int(result.wanted), got=int(result.got)
        )

    def __del__(self) -> None:
        # Only what has been settled can be told; a handle that was still running is held by Core.
        if getattr(self, "_raise", False) and self.error is not None:
            warn_unseen(self.error)

    def __repr__(self) -> str:
        state = "running" if not self.done() else f"failed: {self.error}" if self.error else "done"
        return f"Handle({self.nbytes} bytes, {len(self._extents)} requests, {state})"

"""The engine as Python holds it: the native pointer, the process that owns it, and the transfers that are not done."""

import errno
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any

from .errors import ClosedIOError, ForkedIOError, UnseenErrorWarning
from .native import Native

if TYPE_CHECKING:
    from .handle import Handle

FIRST_SWEEP = 64


class Core:
    """Shared by an AsyncIO, its Files and its Handles; knows none of them, so that no cycle keeps them alive."""

    def __init__(self, native: Native, pointer: Any) -> None:
        self.native = native
        self.ffi = native.ffi
        self.lib = native.lib
        self.pointer = pointer
        self.pid = os.getpid()
        self.closed = False
        # Reentrant: a finalizer may run in the middle of a locked section and settle a handle.
        self.lock = threading.RLock()
        self.registered: dict[int, Any] = {}
        """Address → the buffer that is registered, kept alive until it is unregistered."""
        self._live: set[Handle] = set()
        self._sweep_at = FIRST_SWEEP

    def check(self) -> None:
        """Raises ForkedIOError in a child, ClosedIOError after close()."""
        if os.getpid() != self.pid:
            raise ForkedIOError(
                errno.EPERM,
                f"this AsyncIO belongs to process {self.pid}; process {os.getpid()} was forked from it and has none of its "
                "threads. Open a new AsyncIO after the fork",
            )
        if self.closed:
            raise ClosedIOError(errno.EBADF, "this AsyncIO is closed")

    def keep(self, handle: "Handle") -> None:
        """Holds the handle, and so its memory, until the transfer is done; even when the caller drops it."""
        with self.lock:
            self._live.add(handle)
            if len(self._live) < self._sweep_at:
                return
            done = [handle for handle in self._live if handle.native_done()]
            self._live.difference_update(done)
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._live))
        for handle in done:
            handle.settle()

    def forget(self, handle: "Handle") -> None:
        """The lock is held."""
        self._live.discard(handle)

    def live(self) -> "list[Handle]":
        with self.lock:
            return list(self._live)

    def close(self, cancel: bool) -> None:
        """Ends the engine; idempotent, harmless in a forked child."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        self.lib.lamina_engine_close(self.pointer, int(cancel))
        for handle in self.live():
            handle.settle()
        self.registered.clear()


def warn_unseen(error: Exception) -> None:
    warnings.warn(f"a transfer failed and nobody waited for it: {error}", UnseenErrorWarning, stacklevel=2)

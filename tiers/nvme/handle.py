"""A transfer in flight: it owns its buffer and reports its outcome, however often it is asked."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.aio_native import Handle


class FailedStart:
    """Stands for a transfer that could not even be started, so that its failure is told where all others are."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Raises the failure."""
        raise self.error


@dataclass(frozen=True, slots=True)
class Part:
    """The piece of a transfer that goes to one stripe."""

    stripe: int
    handle: Handle | FailedStart


def started(stripe: int, start: Callable[[], Handle]) -> Part:
    """Start a piece; a failure to start becomes the piece's failure."""
    try:
        return Part(stripe, start())
    except OSError as error:
        return Part(stripe, FailedStart(error))


def as_bytes(buffer: Any) -> memoryview:
    """A flat byte view of a buffer. Raises TypeError when it is not contiguous."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise TypeError("the buffer must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def outcome(handle: Handle | FailedStart, timeout: float | None = None) -> OSError | None:
    """Wait for a native transfer; its failure, if any, however often it is asked. Raises TimeoutError."""
    try:
        handle.wait(timeout)
    except TimeoutError:
        raise
    except OSError as error:
        return error
    return handle.error


class TransferHandle:
    """One read or write of the store, over all its stripes.

    finish: called once, with the bytes, when every part succeeded (checks checksums). rescue: called with the
    failed stripe and its error; returns new parts when the transfer was started again elsewhere, or raises.
    lock: held while either runs.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        buffer: memoryview,
        *,
        finish: Callable[[memoryview], None] | None = None,
        rescue: Callable[[int, OSError], Sequence[Part]] | None = None,
        lock: "threading.RLock | None" = None,
    ) -> None:
        self.nbytes = len(buffer)
        self._parts = tuple(parts)
        self._buffer: memoryview | None = buffer
        self._finish = finish
        self._rescue = rescue
        self._error: Exception | None = None
        self._lock = lock or threading.RLock()

    @property
    def settled(self) -> bool:
        """Whether the outcome is known and the buffer is let go of."""
        return self._buffer is None

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        return self.settled or all(part.handle.done() for part in self._parts)

    def needs_files(self) -> bool:
        """Whether the files it reads must stay as they are: it runs, or has yet to check what it read."""
        return not self.settled and (self._finish is not None or not self.done())

    def wait(self, timeout: float | None = None) -> int:
        """Bytes transferred. Raises what went wrong, again on every call; TimeoutError leaves the transfer
        running."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not self.settled:
            # The I/O is waited for without the lock: a rescue in another thread may need it.
            parts = self._parts
            failure = _first_failure(parts, limit)
            with self._lock:
                if not self.settled and parts is self._parts:
                    self._conclude(failure)
        if self._error is not None:
            raise self._error
        return self.nbytes

    def drain(self) -> None:
        """Wait until no part touches the buffer any more, whatever the outcome (which wait() tells)."""
        for part in self._parts:
            outcome(part.handle)

    def failed(self) -> bool:
        """Whether a drained transfer failed, told without settling it."""
        return not self.settled and _first_failure(self._parts, None) is not None

    def _conclude(self, failure: tuple[Part, OSError] | None) -> None:
        """Settle, or take the parts that a rescue started. The lock is held."""
        try:
            if failure is None:
                if self._finish is not None and self._buffer is not None:
                    self._finish(self._buffer)
            else:
                self.drain()
                part, error = failure
                if self._rescue is None:
                    raise error
                self._parts = tuple(self._rescue(part.stripe, error))
                return
        except (OSError, RuntimeError) as final:
            self._error = final
        self._parts = ()
        self._buffer = self._finish = self._rescue = None  # what they close over holds the bytes, too


class HandleGroup:
    """Several transfers as one: done when all are. moved: bytes that were copied already, within memory."""

    def __init__(self, handles: Sequence[TransferHandle], *, moved: int = 0) -> None:
        self._handles = tuple(handles)
        self._moved = moved

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._moved + sum(handle.nbytes for handle in self._handles)

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        return all(handle.done() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> int:
        """Bytes transferred, once all are over. Raises the first failure, again on every call; TimeoutError leaves them
        running."""
        limit = None if timeout is None else time.monotonic() + timeout
        failure: Exception | None = None
        for handle in self._handles:
            try:
                handle.wait(None if limit is None else max(0.0, limit - time.monotonic()))
            except TimeoutError:
                raise
            except (OSError, RuntimeError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return self.nbytes


def _first_failure(parts: Sequence[Part], limit: float | None) -> tuple[Part, OSError] | None:
    for part in parts:
        error = outcome(part.handle, None if limit is None else max(0.0, limit - time.monotonic()))
        if error is not None:
            return part, error
    return None

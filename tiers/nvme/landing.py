"""A commit in the background: the last writes of a generation end and it becomes current while its caller goes on.

[Note: landing] From the call on, the store reads from the generation that is landing; what it reads of bytes that are still on
their way to the disk begins when they have arrived. The generation before stays whole until the landing is over, since nothing
is written to its files before: a kill or a failure on the way leaves it the current one. A failure refuses every use of the
store until somebody takes it, so that nobody goes on with a mixture of two generations.

[Note: promised writes] Of some shards not even the values may be there when a commit begins. Whoever computes them has promised
their writes before; the commit waits for these as for all others, and so do reads of what they write. They are computed from
the generation before, which is still there.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from lamina.tiers.background import Background
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.handle import Part, TransferHandle


class Landing(Background):
    """One such commit."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(work, "lamina-commit")


class Promise:
    """All writes of one shard, to be started by whoever promised them, also after the commit has begun. It keeps or breaks
    every promise; thread safe."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self._error: BaseException | None = None
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether it was kept or broken."""
        return self._over.is_set()

    @property
    def kept(self) -> bool:
        """Whether all writes are under way."""
        return self.over and self._error is None

    def keep(self) -> None:
        """All writes are under way."""
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """They will not come, and why. Does nothing once it is over."""
        if not self.over:
            self._error = error
            self._over.set()

    def wait(self, timeout: float | None = None) -> None:
        """Until all writes are under way. Raises StoreError where they will not be, or TimeoutError."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.shard}: not written within {timeout} s")
        if self._error is not None:
            raise StoreError(f"{self.shard} could not be written: {self._error}") from self._error


class Awaited(Protocol):
    """What must be over before bytes can be read."""

    @property
    def settled(self) -> bool:
        """Whether ``wait`` would return or raise at once."""

    def wait(self, timeout: float | None = None) -> object:
        """Raises what went wrong, or TimeoutError."""


class PromisedWrites:
    """The writes of a promise that touch certain bytes; ``find`` tells which, once they are under way."""

    def __init__(self, promise: Promise, find: Callable[[], Sequence[TransferHandle]]) -> None:
        self._promise = promise
        self._find = find

    @property
    def settled(self) -> bool:
        return self._promise.over and all(write.settled for write in self._find())

    def wait(self, timeout: float | None = None) -> None:
        self._promise.wait(timeout)
        for write in self._find():
            write.wait(timeout)


class LateTransfer(TransferHandle):
    """A transfer that begins once some writes are over: in ``begin`` or ``wait``. When one of them failed, so has this."""

    def __init__(
        self,
        buffer: memoryview,
        writes: Sequence[Awaited],
        start: Callable[[], Sequence[Part]],
        lock: "threading.RLock",
    ) -> None:
        """``start`` is called once, with the lock held."""
        super().__init__((), buffer, lock=lock)
        self._writes = tuple(writes)
        self._start: Callable[[], Sequence[Part]] | None = start  # None once it has begun: it keeps the buffer alive

    @property
    def ready(self) -> bool:
        """Whether it can begin without a wait."""
        return all(write.settled for write in self._writes)

    def begin(self, timeout: float | None = None) -> None:
        """Wait for the writes and begin; harmless when repeated. TimeoutError leaves it as it was."""
        if self._start is None:
            return
        failure: Exception | None = None
        try:
            for write in self._writes:
                write.wait(timeout)
        except TimeoutError:
            raise
        except (OSError, RuntimeError) as error:
            failure = error
        with self._lock:
            if self._start is None:
                return
            try:
                if failure is None:
                    self._parts = tuple(self._start())
            except (OSError, RuntimeError) as error:
                failure = error
            if failure is not None:
                self._error, self._buffer = failure, None
            self._start, self._writes = None, ()

    def done(self) -> bool:
        return self._start is None and super().done()

    def wait(self, timeout: float | None = None) -> int:
        self.begin(timeout)
        return super().wait(timeout)

    def drain(self) -> None:
        self.begin()
        super().drain()

"""A commit in the background: the last writes of a generation end and it becomes current while its caller goes on.

[Note: landing] From the call on, the store reads from the generation that is landing; what it reads of bytes that are still on
their way to the disk begins when they have arrived. The generation before stays whole until the landing is over, since nothing
is written to its files before: a kill or a failure on the way leaves it the current one. A failure refuses every use of the
store until somebody takes it, so that nobody goes on with a mixture of two generations.
"""

import threading
from collections.abc import Callable, Sequence

from lamina.tiers.background import Background
from lamina.tiers.nvme.handle import Part, TransferHandle


class Landing(Background):
    """One such commit."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(work, "lamina-commit")


class LateTransfer(TransferHandle):
    """A transfer that begins once some writes are over: in ``begin`` or ``wait``. When one of them failed, so has this."""

    def __init__(
        self,
        buffer: memoryview,
        writes: Sequence[TransferHandle],
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

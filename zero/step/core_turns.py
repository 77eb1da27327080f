"""The passes and the update's kernels take turns on the cores.

[Note: Turns] During a pass torch's OpenMP threads hold all cores, and spin while they wait for each other. Kernels that run
beside them in threads of their own slow both down: on two cores passes and Adam did 0.64 (bf16) and 0.73 (fp32) of what they do
one after the other. So the update thread hands its kernel calls to the training thread, which takes them up between two
operations of a backward pass and while it waits for the update, and has them done by torch's own threads (Kernels.use_team). A
training thread that does not come by is not waited for long: it waits for a fetch or reads data, and the cores are free.
"""

import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.01
"""How long a kernel call waits for a training thread that is in a pass: longer than most operations of one take."""


class _Call:
    """A kernel call on its way to the training thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = False
        self.error: BaseException | None = None
        self.began = self.ended = 0.0

    def run(self) -> None:
        self.began = time.perf_counter()
        try:
            self.work()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # a stop that came meanwhile is the training thread's own, too
                raise
        finally:
            self.ended = time.perf_counter()


class CoreTurns:
    """``run`` is called by the update thread, everything else by the training thread. ``state`` is notified of whatever the
    training thread may wait for."""

    def __init__(self, state: threading.Condition, *, patience_s: float = PATIENCE_S) -> None:
        self._state = state
        self._patience_s = patience_s
        self._near = False  # the training thread is expected to take a call up soon
        self._waiting: _Call | None = None
        self.taken_s = 0.0
        """Seconds that calls have taken of passes."""

    def run(self, work: Callable[[], None]) -> tuple[float, float]:
        """Run a kernel call, in the training thread where that comes by; when it began and ended. Raises what it raises."""
        call = _Call(work)
        with self._state:
            if self._near:
                self._waiting = call
                self._state.notify_all()
                self._state.wait_for(lambda: self._waiting is not call or not self._near, self._patience_s)
                if self._waiting is not call:
                    self._state.wait_for(lambda: call.done)
                else:
                    self._waiting, self._near = None, False
        if not call.done:
            call.run()
        if call.error is not None:
            raise call.error
        return call.began, call.ended

    def come_by(self) -> None:
        """In a pass, between two operations: run the call that waits."""
        with self._state:
            self._near = True
            call = self._waiting
        if call is not None and self._take(call):
            self.taken_s += call.ended - call.began

    def leave(self) -> None:
        """The pass is over."""
        with self._state:
            self._near = False
            self._state.notify_all()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached`` (called with ``state`` held), and run the calls that come meanwhile."""
        while True:
            with self._state:
                self._near = True
                self._state.wait_for(lambda: self._waiting is not None or reached())
                call = self._waiting
                if call is None:
                    self._near = False
                    return
            self._take(call)

    def _take(self, call: _Call) -> bool:
        """Run a call that waits; False when it does no more. Wherever Ctrl-C comes, it goes on waiting or its thread is told."""
        taken = False
        try:
            with self._state:
                taken = self._waiting is call and not call.done
                if taken:
                    self._waiting = None
            if taken:
                call.run()
        except BaseException as error:
            call.error = call.error or error
            raise
        finally:
            if taken:
                with self._state:
                    call.done = True
                    self._state.notify_all()
        return taken

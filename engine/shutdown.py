"""SIGINT and SIGTERM: end the step that is under way, save if asked to, give everything back, then stop.

[Note: stop signals]
Handlers are installed only in the main thread, and only where nobody else has: Python's own for SIGINT, none for SIGTERM.
The first signal inside an accumulation window waits for the step that ends it; between windows it acts at once. A second
signal does not wait. Stopping raises KeyboardInterrupt for SIGINT and SystemExit(143) for SIGTERM, after the engine was
closed.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNTOUCHED: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopSignals:
    """``is_busy`` tells whether a window is open; ``stop`` saves and closes (its errors are the user's to see)."""

    def __init__(self, *, is_busy: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.pending: int | None = None
        self._is_busy = is_busy
        self._stop = stop
        self._installed: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is _UNTOUCHED[number]:
                    signal.signal(number, self._received)
                    self._installed.append(number)

    def act(self) -> None:
        """At the end of a step: stop if a signal has come."""
        if self.pending is not None:
            self._leave(self.pending)

    def restore(self) -> None:
        """Put the handlers back that were there before; harmless when repeated."""
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._received:
                    signal.signal(number, _UNTOUCHED[number])
            self._installed.clear()

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.pending is not None:
            self.restore()
            _raise(number)
        if not self._is_busy():
            self._leave(number)
        self.pending = number
        name = signal.Signals(number).name
        sys.stderr.write(f"{name}: the step under way is ended first; once more stops at once\n")

    def _leave(self, number: int) -> NoReturn:
        self.restore()
        self._stop()
        _raise(number)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

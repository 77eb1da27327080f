"""SIGINT and SIGTERM: end the micro-batch that is under way, save if asked to, give everything back, then stop.

[Note: stop signals]
Handlers are installed only in the main thread, and only where nobody else has: Python's own for SIGINT, none for SIGTERM.
The first signal inside a micro-batch waits for the ``step()`` that closes it; between two of them (while data is drawn, say)
it acts at once. An accumulation window that is open then goes into the checkpoint as it is. With several ranks the signal
waits for that ``step()`` in any case, where all ranks learn of it and stop together. A second signal does not wait. Stopping
raises KeyboardInterrupt for SIGINT and SystemExit(143) for SIGTERM, after the engine was closed.
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
    """``is_busy`` tells whether a micro-batch is under way; ``stop`` saves and closes (its errors are the user's to see).

    ``share``, with several ranks: takes this rank's pending signal (0: none) and gives the one that all are to act on."""

    def __init__(
        self, *, is_busy: Callable[[], bool], stop: Callable[[], None], share: Callable[[int], int] | None = None
    ) -> None:
        self.pending: int | None = None
        self._is_busy = is_busy
        self._stop = stop
        self._share = share
        self._installed: list[signal.Signals] = []
        self._over = False
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if _is_free(number):
                    signal.signal(number, self._received)
                    self._installed.append(number)

    def act(self) -> None:
        """At the end of a micro-batch: stop if a signal has come. Collective."""
        number = self.pending or 0
        if self._share is not None:
            number = self._share(number)
        if number:
            self._leave(number)

    def restore(self) -> None:
        """Put the handlers back that were there before; harmless when repeated. Python allows it in the main thread only: where
        another one calls, they give way to those that come next."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._received:
                    signal.signal(number, _UNTOUCHED[number])
            self._installed.clear()

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self._over or self.pending is not None:
            self.restore()
            _raise(number)
        if self._share is None and not self._is_busy():
            self._leave(number)
        self.pending = number
        name = signal.Signals(number).name
        sys.stderr.write(f"{name}: the micro-batch under way is ended first; once more stops at once\n")

    def _leave(self, number: int) -> NoReturn:
        self.restore()
        self._stop()
        _raise(number)


def _is_free(number: int) -> bool:
    """Whether a signal has no handler but Python's own, or that of an engine that is closed."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return handler is _UNTOUCHED[number] or (isinstance(owner, StopSignals) and owner._over)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

"""Ctrl-C, SIGTERM and a closed terminal: an exception that unwinds a command, or a request to stop after a step."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

REPEAT_S = 1.0
"""`timeout` and its like signal a process twice at once, on its own and with its group: that counts as one."""


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end: raised in the main thread, so that everything is closed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = exit_code_of(number)


def exit_code_of(number: int) -> int:
    """As a shell tells of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise Stopped, as SIGINT raises KeyboardInterrupt anyway.

    Only where they would have ended the process at once: what is ignored (nohup) or handled stays so. Does nothing
    outside the main thread, which alone may set handlers.
    """
    changed: list[signal.Signals] = []
    last: dict[int, float] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - last.get(number, -REPEAT_S) < REPEAT_S:
            return
        last[number] = now
        raise Stopped(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    changed.append(number)
                    signal.signal(number, on_signal)
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


class Interrupt:
    """While entered, the first signal sets `requested`; the second raises Stopped at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """0, or the code that tells of the signal that came."""
        return 0 if self._number is None else exit_code_of(self._number)

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def check(self) -> None:
        """Raises Stopped when a stop was requested: for work that may be left in the middle."""
        if self._number is not None:
            raise Stopped(self._number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Stopped(number)
        self._number = number
        name = signal.Signals(number).name
        print(
            f"\nlamina: {name}: stopping after this step; once more to stop at once",
            file=sys.stderr,
            flush=True,
        )

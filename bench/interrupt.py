"""Ctrl-C and SIGTERM as a request to stop after the step in progress."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, the first signal sets `requested`; the second raises KeyboardInterrupt at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

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
        """KeyboardInterrupt when a stop was requested: for work that may be left in the middle."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        print(
            f"\nlamina: {name}: stopping after this step; once more to stop at once",
            file=sys.stderr,
            flush=True,
        )

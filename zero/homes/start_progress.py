"""Says how far a start is that takes long: state on its way to its homes."""

import time
from collections.abc import Callable

FIRST_S = 10.0
"""Seconds of silence: most starts are shorter."""
EVERY_S = 10.0


class StartProgress:
    """Of ``total_bytes`` of parameters on their way home. ``tell`` gets a sentence after FIRST_S, then every EVERY_S seconds, and
    one at the end where there was any before."""

    def __init__(
        self, total_bytes: int, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes = total_bytes
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._due = self._began + FIRST_S
        self._told = False
        self._done_bytes = 0

    def advance(self, nbytes: int) -> None:
        """So many more bytes are at home."""
        self._done_bytes += nbytes
        now = self._clock()
        at_the_end = self._done_bytes >= self._total_bytes
        if now < self._due and not (self._told and at_the_end):
            return
        self._told, self._due = True, now + EVERY_S
        self._tell(
            f"initialize: {self._done_bytes:,} of {self._total_bytes:,} bytes of parameters are at home "
            f"({self._done_bytes / max(self._total_bytes, 1):.0%}) after {now - self._began:.0f} s"
        )

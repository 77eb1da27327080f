"""Ctrl-C that comes by itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_soon(seconds: float = 0.02) -> Iterator[None]:
    """KeyboardInterrupt after so many seconds, wherever this thread is by then; the body must last until it comes."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

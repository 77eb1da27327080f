"""Memory that was freed and that the C library keeps.

[Note: heap] Once a process has freed a block of a few megabytes, glibc takes the next ones of up to that size (32 MiB at
most) from its heap, and gives back only what is free at the heap's end. A model that leaves memory tensor by tensor then leaves
most of its size behind as holes, which are resident and which no larger tensor fits. Other C libraries have no malloc_trim
and are left alone.
"""

import ctypes

EVERY_BYTES = 32 << 20


class Heap:
    """Has holes given back to the system whenever ``every_bytes`` more were freed; see [Note: heap]. Not thread safe."""

    def __init__(self, every_bytes: int = EVERY_BYTES) -> None:
        self._every_bytes = every_bytes
        self._freed = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def freed(self, nbytes: int) -> None:
        """So many bytes were freed just now."""
        self._freed += nbytes
        if self._freed >= self._every_bytes:
            self.give_back()

    def give_back(self) -> None:
        """Now, whatever was freed."""
        self._freed = 0
        if self._trim is not None:
            self._trim(0)

"""The holes of a byte range: best fit, coalescing, exact sizes. Pure bookkeeping, no memory is touched."""

import bisect
from collections.abc import Iterator


class FreeList:
    """Free holes of [0, nbytes). Not thread safe: its owner locks."""

    def __init__(self, nbytes: int) -> None:
        self._sizes: list[tuple[int, int]] = []  # (size, offset), sorted: the first that fits is the best fit
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self.free_bytes = 0
        if nbytes:
            self._add(0, nbytes)

    def copy(self) -> "FreeList":
        """The same holes, to be tried out."""
        other = FreeList(0)
        for offset, size in self:
            other._add(offset, size)
        return other

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return self._sizes[-1][0] if self._sizes else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of every hole, by address."""
        return iter(sorted(self._size_at.items()))

    def take(self, nbytes: int, align: int, base: int = 0) -> int | None:
        """Offset of nbytes > 0 with (base + offset) % align == 0 out of the smallest hole that has them, or
        None."""
        for index in range(bisect.bisect_left(self._sizes, (nbytes, -1)), len(self._sizes)):
            size, start = self._sizes[index]
            offset = start + -(base + start) % align
            if offset + nbytes <= start + size:
                self._cut(start, size, offset, nbytes)
                return offset
        return None

    def take_last(self, nbytes: int, align: int, base: int = 0) -> int | None:
        """The same out of the end of the last hole that has them."""
        for start, size in sorted(self._size_at.items(), reverse=True):
            offset = start + size - nbytes
            offset -= (base + offset) % align
            if offset >= start:
                self._cut(start, size, offset, nbytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Return nbytes > 0 at offset; neighbouring holes become one."""
        start, end = offset, offset + nbytes
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._size_at.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._add(start, end - start)

    def _cut(self, start: int, size: int, offset: int, nbytes: int) -> None:
        """Take bytes out of a hole."""
        self._remove(start, size)
        if offset > start:
            self._add(start, offset - start)
        if offset + nbytes < start + size:
            self._add(offset + nbytes, start + size - offset - nbytes)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._sizes, (size, start))
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        self.free_bytes += size

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (size, start))]
        del self._size_at[start]
        del self._start_of_end[start + size]
        self.free_bytes -= size

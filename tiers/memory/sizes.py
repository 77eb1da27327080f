"""Sizes that come and go, and the largest of them at any time: what sums over thousands of groups are kept up to date with."""

from bisect import bisect_left, insort
from collections.abc import Sequence

FOLLOWED = 3
"""Runs of up to so many groups are kept up to date; sums of longer ones are taken anew when they are asked for."""


class SortedSizes:
    """A multiset of bytes. Zeros are not counted."""

    def __init__(self, ascending: Sequence[int] = ()) -> None:
        self._ascending = list(ascending)

    def copy(self) -> "SortedSizes":
        """Another one with the same sizes."""
        return SortedSizes(self._ascending)

    def __len__(self) -> int:
        return len(self._ascending)

    def add(self, size: int) -> None:
        if size:
            insort(self._ascending, size)

    def remove(self, size: int) -> None:
        """Takes one of that size out. Raises ValueError where there is none."""
        if not size:
            return
        index = bisect_left(self._ascending, size)
        if index == len(self._ascending) or self._ascending[index] != size:
            raise ValueError(f"no size of {size:,} bytes is counted")
        del self._ascending[index]

    def exchange(self, old: int, new: int) -> None:
        """Takes out one size and adds another. Raises ValueError where there is none to take out."""
        if old != new:
            self.remove(old)
            self.add(new)

    def largest(self, number: int) -> list[int]:
        """The so many largest, in descending order; all where there are fewer."""
        return self._ascending[: -number - 1 : -1] if number > 0 else []

    @property
    def maximum(self) -> int:
        """0 where there are none."""
        return self._ascending[-1] if self._ascending else 0


class GroupSizes:
    """Bytes of each group, of which segments add and take away their part: the largest group, and the largest run of groups that
    follow each other. Groups without bytes are passed over."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._row: list[int] = []  # groups with bytes, in order
        self._runs: dict[int, SortedSizes] = {}  # by length: the sums of all runs of so many groups
        self.sorted = SortedSizes()
        self.total = 0

    def copy(self) -> "GroupSizes":
        """Another one with the same groups."""
        other = GroupSizes()
        other._of, other._row, other.total = dict(self._of), list(self._row), self.total
        other._runs = {length: sums.copy() for length, sums in self._runs.items()}
        other.sorted = self.sorted.copy()
        return other

    def __getitem__(self, group: int) -> int:
        return self._of.get(group, 0)

    def __len__(self) -> int:
        return len(self._row)

    def change(self, group: int, nbytes: int) -> None:
        """Let a group have so many bytes more (or fewer)."""
        if not nbytes:
            return
        before = self._of.get(group, 0)
        for length, sums in self._runs.items():
            for run in self._around(group, length):
                sums.remove(run)
        self._of[group] = before + nbytes
        self.total += nbytes
        self.sorted.exchange(before, before + nbytes)
        if not before and nbytes:
            insort(self._row, group)
        elif before and not before + nbytes:
            del self._row[bisect_left(self._row, group)]
        for length, sums in self._runs.items():
            for run in self._around(group, length):
                sums.add(run)

    def largest_run(self, length: int) -> int:
        """The most bytes that so many groups in a row have; of all where there are fewer."""
        if length >= len(self._row):
            return self.total
        if length < 1:
            return 0
        if length > FOLLOWED:
            return max(self._sums(length, 0, len(self._row) - length))
        if length not in self._runs:
            sums = self._runs[length] = SortedSizes()
            for run in self._sums(length, 0, len(self._row) - length):
                sums.add(run)
        return self._runs[length].maximum

    def _around(self, group: int, length: int) -> list[int]:
        """Sums of the runs that a group is in, or would be in the middle of."""
        at = bisect_left(self._row, group)
        there = at < len(self._row) and self._row[at] == group
        return self._sums(length, max(at - length + 1, 0), min(at if there else at - 1, len(self._row) - length))

    def _sums(self, length: int, first: int, last: int) -> list[int]:
        """Of the runs that begin at places ``first`` to ``last`` of the row."""
        if first > last:
            return []
        sizes = [self._of[group] for group in self._row[first : last + length]]
        run = sum(sizes[:length])
        found = [run]
        for gone, come in zip(sizes, sizes[length:], strict=False):
            run += come - gone
            found.append(run)
        return found

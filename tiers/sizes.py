"""Sizes that come and go, and the largest of them at any time: what sums over thousands of groups are kept up to date with."""

from bisect import bisect_left, insort


class SortedSizes:
    """A multiset of bytes. Zeros are not counted."""

    def __init__(self) -> None:
        self._ascending: list[int] = []

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

    def largest(self, number: int) -> list[int]:
        """The so many largest, in descending order; all where there are fewer."""
        return self._ascending[: -number - 1 : -1] if number > 0 else []

    @property
    def maximum(self) -> int:
        """0 where there are none."""
        return self._ascending[-1] if self._ascending else 0


class GroupSizes:
    """Bytes of each group, of which segments add and take away their part, and the largest groups."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self.sorted = SortedSizes()

    def __getitem__(self, group: int) -> int:
        return self._of.get(group, 0)

    def change(self, group: int, nbytes: int) -> None:
        """Let a group have so many bytes more (or fewer)."""
        before = self._of.get(group, 0)
        self._of[group] = before + nbytes
        self.sorted.remove(before)
        self.sorted.add(before + nbytes)

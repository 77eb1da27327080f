"""Where a shard's values are, seen from memory: an enum whose transitions are methods, legal ones only."""

import enum


class Residency(enum.Enum):
    """What a copy in memory is to its home (NVMe, a scratch file, another tier).

    ABSENT: there is none. FETCHING: it is being filled. RESIDENT: it can be used, and the home has the same. DIRTY: it can
    be used, and the home has something older, or nothing. WRITING: its values are on their way home and must not change.

    Each method returns the state after an event and raises RuntimeError, naming both, where the event cannot be: what is
    DIRTY or WRITING cannot be evicted, so that no value is lost unless it is dropped on purpose.
    """

    ABSENT = "absent"
    FETCHING = "fetching"
    RESIDENT = "resident"
    DIRTY = "dirty"
    WRITING = "writing"

    def fetch(self) -> "Residency":
        """A transfer from home begins."""
        return self._after("fetch")

    def arrive(self) -> "Residency":
        """The transfer from home is over."""
        return self._after("arrive")

    def create(self) -> "Residency":
        """Values come into being here that no home has."""
        return self._after("create")

    def change(self) -> "Residency":
        """The values are changed."""
        return self._after("change")

    def write(self) -> "Residency":
        """A transfer home begins."""
        return self._after("write")

    def written(self) -> "Residency":
        """The transfer home is over."""
        return self._after("written")

    def fail(self) -> "Residency":
        """The transfer that was under way failed, or was given up: what was on its way here is not here, what was on its
        way home is only here."""
        return self._after("fail")

    def evict(self) -> "Residency":
        """The memory is used for something else; the home has the values."""
        return self._after("evict")

    def drop(self) -> "Residency":
        """The newer values are given up on purpose."""
        return self._after("drop")

    @property
    def usable(self) -> bool:
        """Whether the values can be read here."""
        return self in (Residency.RESIDENT, Residency.DIRTY, Residency.WRITING)

    def _after(self, event: str) -> "Residency":
        found = TRANSITIONS[event].get(self)
        if found is None:
            legal = " or ".join(state.value for state in TRANSITIONS[event])
            raise RuntimeError(f"cannot {event} what is {self.value}: it must be {legal}")
        return found


TRANSITIONS: dict[str, dict[Residency, Residency]] = {
    "fetch": {Residency.ABSENT: Residency.FETCHING},
    "arrive": {Residency.FETCHING: Residency.RESIDENT},
    "create": {Residency.ABSENT: Residency.DIRTY},
    "change": {Residency.RESIDENT: Residency.DIRTY, Residency.DIRTY: Residency.DIRTY},
    "write": {Residency.DIRTY: Residency.WRITING},
    "written": {Residency.WRITING: Residency.RESIDENT},
    "fail": {Residency.FETCHING: Residency.ABSENT, Residency.WRITING: Residency.DIRTY},
    "evict": {Residency.RESIDENT: Residency.ABSENT},
    "drop": {Residency.DIRTY: Residency.ABSENT},
}
"""Event -> state before -> state after; everything else is refused."""

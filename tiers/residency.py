"""Where a group's parameters are, seen from the device tier: an enum whose transitions are methods."""

import enum


class Residency(enum.Enum):
    """ABSENT (only its home has it), FETCHING (a transfer is under way), RESIDENT (usable)."""

    ABSENT = "absent"
    FETCHING = "fetching"
    RESIDENT = "resident"

    def fetch(self) -> "Residency":
        return self._move(Residency.ABSENT, Residency.FETCHING, "fetch")

    def arrive(self) -> "Residency":
        return self._move(Residency.FETCHING, Residency.RESIDENT, "arrive")

    def evict(self) -> "Residency":
        return self._move(Residency.RESIDENT, Residency.ABSENT, "evict")

    def fail(self) -> "Residency":
        return self._move(Residency.FETCHING, Residency.ABSENT, "fail")

    def _move(self, wanted: "Residency", then: "Residency", verb: str) -> "Residency":
        if self is not wanted:
            raise RuntimeError(f"cannot {verb} a group that is {self.value}: it must be {wanted.value}")
        return then

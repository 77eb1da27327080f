"""How the time of a run is divided, and handed out as the run goes on. Pure: the clock is passed in."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

GATHER_S = 10.0
"""Two processes import torch: seconds, whatever the time for measuring."""
GATHER_LEAST_RUN_S = 28.0
TORCH_S = 3.0
SETUP_RATE = 1.5e9
"""Bytes per second that creating files is taken to reach."""
SEARCH_LEAST = 0.4
"""Share of the time that the small parts leave to the search, fio included, however many there are."""
FIXED = ("gather",)
"""Parts that take their time whatever they are given."""


class OutOfTime(Exception):
    """The run's time is over: what has been measured until now must do."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run and the seconds planned for it."""

    name: str
    seconds: float


def divide(
    seconds: float,
    *,
    paths: int,
    size_bytes: int,
    processes: int,
    fio: bool,
    extras: Collection[str],
    insist_on_gather: bool = False,
) -> list[Part]:
    """The parts in the order in which they run: small shares for the small ones, the rest for the search.

    fio gets half of the search's time where it is asked for. The all-gather takes its time however short the run, so
    short runs go without it unless insist_on_gather. Parts of a path come once for each path.
    """

    def part(share: float, most: float, *, wanted: bool = True) -> float:
        return min(share * seconds, most) if wanted else 0.0

    gathers = "allgather" in extras and (insist_on_gather or seconds >= GATHER_LEAST_RUN_S)
    torch_s = part(0.05, TORCH_S, wanted="memory" in extras or "device" in extras)
    each = {
        "setup": part(0.1, 0.5 + size_bytes * (2 if processes > 1 else 1) / SETUP_RATE),
        "search": 0.0,
        "pages": part(0.06, 4.0),
        "region": part(0.02, 1.0),
        "processes": part(0.08, 5.0, wanted=processes > 1),
        "fio": 0.0,
    }
    once = {
        "together": part(0.1, 6.0, wanted=paths > 1),
        "memory": part(0.05, 3.0, wanted="memory" in extras) + torch_s,
        "device": part(0.04, 2.0, wanted="device" in extras),
        "gather": GATHER_S if gathers else 0.0,
    }
    gather = once.pop("gather")
    small = sum(once.values()) + paths * sum(each.values())
    rest = max(0.0, seconds - gather)
    scale = min(1.0, (1 - SEARCH_LEAST) * rest / small)
    each = {name: scale * planned for name, planned in each.items()}
    once = {name: scale * planned for name, planned in once.items()}
    left = (rest - scale * small) / paths
    each["fio"] = 0.5 * left if fio else 0.0
    each["search"] = left - each["fio"]
    once["gather"] = gather
    named = [*each.items()] * paths + [*once.items()]
    return [Part(name=name, seconds=planned) for name, planned in named if planned > 0]


class Allowance:
    """Hands out the time: a part that comes late gets less, one that comes early more, in proportion to the plan.

    deadline_s: from then on check() raises, so that parts which take longer than they were given end all the same.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        seconds: float,
        now: Callable[[], float],
        *,
        began: float | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        self._parts = list(parts)
        self._now = now
        self._began = now() if began is None else began
        self._seconds = seconds
        self._deadline_s = deadline_s

    @property
    def spent(self) -> float:
        """Seconds since the run began."""
        return self._now() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline_s - self.spent)

    def check(self) -> None:
        """Raises OutOfTime after the deadline."""
        if self.spent > self._deadline_s:
            raise OutOfTime

    @property
    def share(self) -> float:
        """How much of the run's time is over, 0 to 1."""
        return min(1.0, self.spent / self._seconds)

    def take(self, name: str) -> float:
        """Seconds for the next part of this name; parts planned before it are over. 0 when it is not planned."""
        index = next((number for number, part in enumerate(self._parts) if part.name == name), None)
        if index is None:
            return 0.0
        parts, self._parts = self._parts[index:], self._parts[index + 1 :]
        if name in FIXED:
            return parts[0].seconds
        fixed = sum(part.seconds for part in parts if part.name in FIXED)
        flexible = sum(part.seconds for part in parts if part.name not in FIXED)
        left = max(0.0, self._seconds - self.spent - fixed)
        return parts[0].seconds / flexible * left

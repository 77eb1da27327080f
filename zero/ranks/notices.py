"""What ranks put down for each other while they wait, in the store through which they met.

[Note: ranks that wait for ever] A collective whose partners do not come is waited for until its timeout. So once a wait has
lasted for LOOK_S, a rank puts down what it waits for and how many collectives it has started on each lane, and reads what the
others have put down. Nobody will come when a rank has left, or when all wait, each for a collective that another one has not
started. Two looks must find the same, since a notice may be older than what its rank does now. Shorter waits cost nothing.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

LOOK_S = 0.5


class Doing(StrEnum):
    """What a rank does, as far as others need to know."""

    GOING_ON = "going on"
    WAITING = "waiting"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """``what``: is waited for, or why the rank has left. ``lane``, ``index``: the collective that is waited for, counted from 1;
    ``started``: collectives on each lane."""

    serial: int = 0
    doing: Doing = Doing.GOING_ON
    what: str = ""
    lane: int = 0
    index: int = 0
    started: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Notice":
        fields = json.loads(text)
        return cls(**fields | {"doing": Doing(fields["doing"]), "started": tuple(fields["started"])})


def hopeless(notices: Sequence[Notice], rank: int) -> str | None:
    """Why what ``rank`` waits for will not come; None while it may."""

    def lacks(waiting: Notice, other: Notice) -> bool:
        return len(other.started) > waiting.lane and other.started[waiting.lane] < waiting.index

    mine = notices[rank]
    for index, notice in enumerate(notices):
        if notice.doing is Doing.LEFT and lacks(mine, notice):
            return f"rank {index} {notice.what}"
    if all(one.doing is Doing.WAITING and any(lacks(one, other) for other in notices) for one in notices):
        return f"all wait: {'; '.join(f'rank {index} for {one.what}' for index, one in enumerate(notices))}"
    return None


@dataclass(kw_only=True)
class Board:
    """The notices of all ranks. ``store``: torch's, with a prefix of this board's own; None: nothing is put down."""

    rank: int
    world_size: int
    store: Any
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mine = Notice()

    def put(self, doing: Doing, what: str, lane: int = 0, index: int = 0) -> None:
        self._mine = Notice(
            serial=self._mine.serial + 1, doing=doing, what=what, lane=lane, index=index, started=tuple(self.started)
        )
        if self.store is not None:
            try:
                self.store.set(str(self.rank), json.dumps(asdict(self._mine)))
            except (
                RuntimeError
            ):  # it went with the process that kept it: the collectives' own errors and timeouts are left
                self.store = None

    def read(self) -> list[Notice]:
        """Everybody's, this rank's own as it is."""
        notices = [Notice()] * self.world_size
        notices[self.rank] = self._mine
        try:
            for rank in range(self.world_size):
                if self.store is not None and rank != self.rank and self.store.check([str(rank)]):
                    notices[rank] = Notice.parse(self.store.get(str(rank)).decode())
        except RuntimeError:
            self.store = None
        return notices

    def leave(self) -> None:
        """This rank will start no more collectives. The error that is handled now, or ended the script, is told as the reason."""
        if self._mine.doing is not Doing.LEFT:
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            after = f" after {type(error).__name__}: {error}" if error is not None else ""
            self.put(Doing.LEFT, f"has closed its engine{after}")

    def who_left(self) -> str:
        """A clause for each rank that has left."""
        left = [f"rank {rank} {one.what}" for rank, one in enumerate(self.read()) if one.doing is Doing.LEFT]
        return "".join(f". {clause}" for clause in left)

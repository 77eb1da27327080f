"""A lane: one process group, whose collectives all ranks start in one order."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from .notices import LOOK_S, Board, Doing, Notice, hopeless


@dataclass(kw_only=True)
class Lane:
    """``on_cpu``: collectives of the group block the CPU while they are waited for; see [Note: ranks that wait for ever]."""

    group: Any
    board: Board
    number: int
    on_cpu: bool = True
    under_way: list["LaneWork"] = field(default_factory=list)

    def start(self, what: str, collective: Callable[..., Any], *args: Any, **options: Any) -> "LaneWork":
        """Begin one of torch.distributed's collectives; ``what`` it is for is told in errors."""
        self.board.started[self.number] += 1
        work = collective(*args, group=self.group, async_op=True, **options)
        begun = LaneWork(lane=self, index=self.board.started[self.number], what=what, work=work)
        self.under_way.append(begun)
        return begun

    def run(self, what: str, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        """The same, and wait for it."""
        self.start(what, collective, *args, **options).wait()

    def close(self) -> None:
        """Give the group back. A collective of gloo that nobody comes to cannot be ended (its abort() does nothing): a thread
        then keeps the group until it ends by itself, so that nobody has to wait for it."""
        lasting = [one.work for one in self.under_way if not one.is_completed()]
        if lasting and not self.on_cpu and hasattr(self.group, "abort"):
            self.group.abort()
        dist.destroy_process_group(self.group)
        if lasting and self.on_cpu:
            threading.Thread(target=_outlast, args=(lasting, self.group), name="lamina-lane", daemon=True).start()
        self.under_way.clear()
        self.group = None


@dataclass(kw_only=True, eq=False)
class LaneWork:
    """A collective under way, the ``index``-th of its lane."""

    lane: Lane
    index: int
    what: str
    work: Any

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Raises RuntimeError when the collective fails, or its partners will not come."""
        if not self.lane.on_cpu:
            self.work.wait()  # NCCL: makes the current stream wait
        elif not self._ends_within(LOOK_S):
            self._wait_and_look()
        if self in self.lane.under_way:
            self.lane.under_way.remove(self)

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self.work.is_completed():
                return False
            self.work.wait()  # it ended meanwhile, or this tells why it failed
        return True

    def _wait_and_look(self) -> None:
        board, before = self.lane.board, list[Notice]()
        board.put(Doing.WAITING, self.what, self.lane.number, self.index)
        while not self._ends_within(LOOK_S):
            notices = board.read()
            reason = hopeless(notices, board.rank)
            if reason is not None and notices == before:
                raise RuntimeError(reason)
            before = notices
        board.put(Doing.GOING_ON, "")


def _outlast(works: Sequence[Any], _group: Any) -> None:
    while not all(work.is_completed() for work in works):
        time.sleep(LOOK_S)

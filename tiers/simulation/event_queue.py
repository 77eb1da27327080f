"""A small discrete-event kernel: a clock, signals, processes that wait for them, and channels that take time to serve.

Deterministic: what happens at one time happens in the order in which it was asked for.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count

EPSILON = 1e-9
"""Seconds that count as nothing: what rounding leaves of a job."""


class Signal:
    """Something that happens once; processes and callbacks wait for it."""

    __slots__ = ("_waiting", "at")

    def __init__(self) -> None:
        self.at: float | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def fired(self) -> bool:
        return self.at is not None

    def fire(self, at: float) -> None:
        self.at = at
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def when_fired(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once it has happened, at once if it has."""
        if self.fired:
            wake()
        else:
            self._waiting.append(wake)


Process = Generator[Signal, None, None]
"""A simulated thread: yields the signals that it waits for."""


class EventQueue:
    """The clock. ``run`` goes on until nothing is left to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), what))

    def after(self, seconds: float) -> Signal:
        """Happens ``seconds`` from now."""
        signal = Signal()
        self.at(self.now + seconds, lambda: signal.fire(self.now))
        return signal

    def start(self, process: Process) -> Signal:
        """Run a process from now on; the signal fires when it has ended."""
        ended = Signal()

        def resume() -> None:
            # A loop rather than recursion: signals that have fired already are passed by.
            for signal in process:
                if not signal.fired:
                    signal.when_fired(resume)
                    return
            ended.fire(self.now)

        self.at(self.now, resume)
        return ended

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass(slots=True)
class _Job:
    left_s: float
    latency_s: float
    done: Signal


@dataclass(kw_only=True)
class Channel:
    """Serves jobs that take time, in two lanes (reads and writes; passes and Adam).

    In a lane the most urgent job comes first, then the oldest; a more urgent one overtakes what is under way. When both
    lanes have work each runs at ``pace_together`` of its speed: 0.5 when they share the time, 1 when they do not know of each
    other. ``one_lane``: urgency counts across both, only one of them runs.
    """

    queue: EventQueue
    pace_together: float = 0.5
    one_lane: bool = False
    busy_s: float = 0.0
    _lanes: tuple[list[tuple[int, int, _Job]], list[tuple[int, int, _Job]]] = field(default_factory=lambda: ([], []))
    _since: float = 0.0
    _number: int = 0
    _version: int = 0

    def serve(self, lane: int, seconds: float, *, priority: int = 0, latency_s: float = 0.0) -> Signal:
        """Queue a job of ``seconds`` alone on the channel; the signal fires ``latency_s`` after it was served."""
        self._advance()
        job = _Job(max(seconds, 0.0), latency_s, Signal())
        self._number += 1
        heapq.heappush(self._lanes[lane], (priority, self._number, job))
        self._schedule()
        return job.done

    def _running(self) -> list[int]:
        """Lanes whose first job is being served."""
        first, second = self._lanes
        if self.one_lane and first and second:
            return [0 if first[0][:2] < second[0][:2] else 1]
        return [lane for lane in (0, 1) if self._lanes[lane]]

    def _advance(self) -> None:
        """Account for the time since the last change."""
        passed = self.queue.now - self._since
        self._since = self.queue.now
        running = self._running()
        if not running or passed <= 0:
            return
        self.busy_s += passed
        pace = self.pace_together if len(running) == 2 else 1.0
        for lane in running:
            self._lanes[lane][0][2].left_s -= passed * pace

    def _schedule(self) -> None:
        """Set the alarm for the next job that ends."""
        self._version += 1
        running = self._running()
        if not running:
            return
        pace = self.pace_together if len(running) == 2 else 1.0
        soonest = min(max(self._lanes[lane][0][2].left_s, 0.0) / pace for lane in running)
        version = self._version
        self.queue.at(self.queue.now + soonest, lambda: self._ring(version))

    def _ring(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ready = [lane for lane in self._running() if self._lanes[lane][0][2].left_s <= EPSILON]
        ended = [heapq.heappop(self._lanes[lane])[2] for lane in ready]
        self._schedule()
        for job in ended:
            if job.latency_s:
                self.queue.at(self.queue.now + job.latency_s, lambda done=job.done: done.fire(self.queue.now))  # type: ignore[misc]
            else:
                job.done.fire(self.queue.now)

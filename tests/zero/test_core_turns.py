"""Who runs the update's kernel calls: the training thread where it comes by, else the update thread."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lamina.zero.step.core_turns import CoreTurns

LIMIT_S = 60.0  # for what happens at once, however slow the machine is


class UpdateThread:
    """Calls ``run`` in a thread of its own and remembers where the work ran, and what it raised."""

    def __init__(self, turns: CoreTurns, work: Callable[[], None] = lambda: None) -> None:
        self.ran_in: list[threading.Thread] = []
        self.error: BaseException | None = None
        self._turns = turns
        self._work = work
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        def work() -> None:
            self.ran_in.append(threading.current_thread())
            self._work()

        try:
            began, ended = self._turns.run(work)
            assert began <= ended
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def join(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def turns() -> CoreTurns:
    return CoreTurns(threading.Condition(), patience_s=10 * LIMIT_S)


class Watched(threading.Condition):
    """Notes for how long it was waited on; ``waiting`` is set at the first time, while the lock is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.waiting = threading.Event()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self.waiting.set()
        return super().wait_for(predicate, timeout)


class Cut(Watched):
    """Ctrl-C comes when ``main`` has given the lock back so many more times."""

    def __init__(self) -> None:
        super().__init__()
        self.main = threading.current_thread()
        self.left = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if threading.current_thread() is self.main and self.left:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def come_by_until(turns: CoreTurns, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done() and time.monotonic() < deadline:
        turns.come_by()


def test_outside_of_a_pass_the_update_thread_runs_it_itself(turns: CoreTurns) -> None:
    update = UpdateThread(turns)
    update.join()
    assert update.ran_in == [update.thread]
    assert turns.taken_s == 0.0


def test_in_a_pass_the_training_thread_runs_it(turns: CoreTurns) -> None:
    turns.come_by()
    update = UpdateThread(turns, lambda: time.sleep(0.02))
    come_by_until(turns, lambda: bool(update.ran_in))
    update.join()
    assert update.ran_in == [threading.current_thread()]
    assert 0.02 <= turns.taken_s < LIMIT_S


def test_a_training_thread_that_stays_away_is_not_waited_for_again() -> None:
    state = Watched()
    turns = CoreTurns(state, patience_s=0.2)
    turns.come_by()
    for _ in range(2):
        update = UpdateThread(turns)
        update.join()
        assert update.ran_in == [update.thread]
        assert state.waits == [0.2], "the second call runs at once"


def test_the_end_of_a_pass_lets_a_call_go() -> None:
    state = Watched()
    turns = CoreTurns(state, patience_s=10 * LIMIT_S)
    turns.come_by()
    update = UpdateThread(turns)
    assert state.waiting.wait(LIMIT_S)
    turns.leave()
    update.join()
    assert update.ran_in == [update.thread]
    assert state.waits == [10 * LIMIT_S], "and it did not wait again"


def test_a_training_thread_that_waits_runs_all_calls_that_come() -> None:
    state = threading.Condition()
    turns = CoreTurns(state, patience_s=10 * LIMIT_S)
    updates: list[UpdateThread] = []
    over = threading.Event()

    def several() -> None:
        for _ in range(5):
            updates.append(UpdateThread(turns))
            updates[-1].join()
        with state:
            over.set()
            state.notify_all()

    turns.come_by()  # so that the first calls wait, even where this thread is slow to
    caller = threading.Thread(target=several)
    caller.start()
    turns.wait_for(over.is_set)
    caller.join()
    assert [ran for update in updates for ran in update.ran_in] == [threading.current_thread()] * 5


def test_what_a_call_raises_is_for_the_update_thread(turns: CoreTurns) -> None:
    def fail() -> None:
        raise OSError("broken")

    turns.come_by()
    update = UpdateThread(turns, fail)
    come_by_until(turns, lambda: bool(update.ran_in))
    update.join()
    assert isinstance(update.error, OSError)


def test_a_stop_in_a_call_reaches_both_threads(turns: CoreTurns) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    turns.come_by()
    update = UpdateThread(turns, stop)
    with pytest.raises(KeyboardInterrupt):
        come_by_until(turns, lambda: bool(update.ran_in))
    update.join()
    assert isinstance(update.error, KeyboardInterrupt)


def cut_when_a_call_waits(left: int) -> tuple[CoreTurns, UpdateThread]:
    """Ctrl-C comes in ``come_by`` when the lock is given back so many times."""
    state = Cut()
    turns = CoreTurns(state, patience_s=10 * LIMIT_S)
    turns.come_by()
    update = UpdateThread(turns)
    assert state.waiting.wait(LIMIT_S)
    state.left = left
    with pytest.raises(KeyboardInterrupt):
        turns.come_by()
    return turns, update


def test_ctrl_c_before_a_call_is_taken_up_leaves_it_waiting() -> None:
    turns, update = cut_when_a_call_waits(left=1)
    turns.come_by()
    update.join()
    assert update.ran_in == [threading.current_thread()]
    assert update.error is None


def test_ctrl_c_before_a_call_that_is_taken_up_begins_reaches_both_threads() -> None:
    _, update = cut_when_a_call_waits(left=2)
    update.join()
    assert update.ran_in == []
    assert isinstance(update.error, KeyboardInterrupt)

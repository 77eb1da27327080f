"""Who runs the update's kernel calls: the training thread where it comes by, else the update thread."""

import threading
import time
from collections.abc import Callable

import pytest

from lamina.zero.core_turns import CoreTurns


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
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def turns() -> CoreTurns:
    return CoreTurns(threading.Condition(), patience_s=10)  # however slow the machine is


def come_by_until(turns: CoreTurns, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        turns.come_by()


def test_outside_of_a_pass_the_update_thread_runs_it_itself(turns: CoreTurns) -> None:
    update = UpdateThread(turns)
    update.join()
    assert update.ran_in == [update.thread]
    assert turns.take_seconds() == 0.0


def test_in_a_pass_the_training_thread_runs_it(turns: CoreTurns) -> None:
    turns.come_by()
    update = UpdateThread(turns, lambda: time.sleep(0.02))
    come_by_until(turns, lambda: bool(update.ran_in))
    update.join()
    assert update.ran_in == [threading.current_thread()]
    assert 0.02 <= turns.take_seconds() < 5
    assert turns.take_seconds() == 0.0, "asked for already"


def test_a_training_thread_that_stays_away_is_not_waited_for_again() -> None:
    turns = CoreTurns(threading.Condition(), patience_s=0.2)
    turns.come_by()
    took = []
    for _ in range(2):
        began = time.monotonic()
        update = UpdateThread(turns)
        update.join()
        took.append(time.monotonic() - began)
        assert update.ran_in == [update.thread]
    assert took[0] >= 0.2 > took[1]


def test_the_end_of_a_pass_lets_a_call_go(turns: CoreTurns) -> None:
    turns.come_by()
    began = time.monotonic()
    update = UpdateThread(turns)
    time.sleep(0.05)
    turns.leave()
    update.join()
    assert update.ran_in == [update.thread]
    assert time.monotonic() - began < 8


def test_a_training_thread_that_waits_runs_all_calls_that_come() -> None:
    state = threading.Condition()
    turns = CoreTurns(state, patience_s=10)
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

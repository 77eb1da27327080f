"""Residency against a plain model of two places, each with the version of the values that it has."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lamina.tiers import Residency
from lamina.tiers.schedule.residency import TRANSITIONS


class ResidencyMachine(RuleBasedStateMachine):
    """here, home: the version that memory and home have (None: nothing). way: "in" or "out" while a transfer runs.

    Whether an event can be is decided by what it would do to the versions, not by a table of states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = Residency.ABSENT
        self.here: int | None = None
        self.home: int | None = 0
        self.way = ""
        self.newest = 0

    def apply(self, event: str, possible: bool) -> bool:
        if not possible:
            with pytest.raises(RuntimeError, match=f"cannot {event} what is {self.state.value}: it must be"):
                getattr(self.state, event)()
            return False
        self.state = getattr(self.state, event)()
        return True

    @rule()
    def fetch(self) -> None:
        if self.apply("fetch", not self.way and self.here is None):
            self.way = "in"

    @rule()
    def arrive(self) -> None:
        if self.apply("arrive", self.way == "in"):
            self.way, self.here = "", self.home

    @rule()
    def create(self) -> None:
        if self.apply("create", not self.way and self.here is None):
            self.newest += 1
            self.here = self.newest

    @rule()
    def change(self) -> None:
        if self.apply("change", not self.way and self.here is not None):
            self.newest += 1
            self.here = self.newest

    @rule()
    def write(self) -> None:
        if self.apply("write", not self.way and self.here is not None and self.here != self.home):
            self.way = "out"

    @rule()
    def written(self) -> None:
        if self.apply("written", self.way == "out"):
            self.way, self.home = "", self.here

    @rule()
    def fail(self) -> None:
        if self.apply("fail", self.way != ""):
            self.way = ""

    @rule()
    def evict(self) -> None:
        if self.apply("evict", not self.way and self.here is not None and self.here == self.home):
            self.here = None

    @rule()
    def drop(self) -> None:
        if self.apply("drop", not self.way and self.here is not None and self.here != self.home):
            self.here, self.newest = None, self.home or 0

    @invariant()
    def the_state_tells_what_is_where(self) -> None:
        assert self.newest in (self.here, self.home)  # never lost
        expected = {
            ("", False, False): Residency.ABSENT,
            ("in", False, False): Residency.FETCHING,
            ("", True, True): Residency.RESIDENT,
            ("", True, False): Residency.DIRTY,
            ("out", True, False): Residency.WRITING,
        }
        assert self.state is expected[self.way, self.here is not None, self.here == self.home]
        assert self.state.usable == (self.here is not None)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("event", TRANSITIONS)
@pytest.mark.parametrize("state", Residency)
def test_every_event_in_every_state(event: str, state: Residency) -> None:
    """Exactly what the table lists can happen, and a refusal names the state, the event and what would be legal."""
    then = TRANSITIONS[event].get(state)
    if then is not None:
        assert getattr(state, event)() is then
        return
    with pytest.raises(RuntimeError, match=f"cannot {event} what is {state.value}") as caught:
        getattr(state, event)()
    assert all(legal.value in str(caught.value) for legal in TRANSITIONS[event])


def test_every_state_is_reached_and_left() -> None:
    steps = [pair for table in TRANSITIONS.values() for pair in table.items()]
    assert {before for before, _ in steps} == {after for _, after in steps} == set(Residency)

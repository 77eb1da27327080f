"""Fetched copies that outlive a step: which are kept, what that saves to the byte, and that none holds what does not count."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_links import MIB, links

from lamina.aio_native import Priority
from lamina.tiers import (
    Access,
    Arena,
    Block,
    Executor,
    GroupModel,
    Spans,
    StepModel,
    SubGroup,
    Tier,
    UpdateModel,
    simulate,
)

SIZE = 4096


@dataclass(kw_only=True)
class Filling:
    """A fetch that is over when it is waited for."""

    fill: Callable[[], None]

    def advance(self) -> None: ...
    def drop(self) -> None: ...
    def wait(self) -> None:
        self.fill()


@dataclass(kw_only=True)
class Home:
    """A group whose every byte is the number of its version."""

    name: str
    nbytes: int = SIZE
    version: int = 1
    outlives_step: bool = True
    reads: int = 0
    bound: Block | None = None
    kept: list[bool] = field(default_factory=list)

    def start(self, block: Block, priority: Priority) -> Filling:
        self.reads += 1
        version = self.version
        return Filling(fill=lambda: self.write(block, version))

    def write(self, block: Block, version: int) -> None:
        block.view[:] = bytes([version]) * self.nbytes

    def bind(self, block: Block) -> None:
        assert self.bound is None
        self.bound = block

    def keep(self, block: Block, *, renewed: bool) -> Filling:
        assert self.bound is None, "a kept copy can be changed behind its home's back"
        self.kept.append(renewed)
        return Filling(fill=lambda: None)

    def unbind(self) -> None:
        assert self.bound is not None
        self.bound = None

    @property
    def seen(self) -> int:
        """The version that compute sees."""
        assert self.bound is not None
        (version,) = set(bytes(self.bound.view))
        return version


def build(groups: int, window: int, *, lookahead: int = 64, outlives: bool = True) -> tuple[Executor, list[Home]]:
    homes = [Home(name=f"g{index}", outlives_step=outlives) for index in range(groups)]
    arena = Arena(Tier.DEVICE, window * SIZE)
    return Executor(arena=arena, sources=homes, lookahead=lookahead, spans=Spans()), homes


def there_and_back(executor: Executor, homes: Sequence[Home]) -> None:
    for index in [*range(len(homes)), *reversed(range(len(homes)))]:
        executor.acquire(index)
        assert homes[index].seen == homes[index].version


def update(executor: Executor, homes: Sequence[Home], *, renew: bool = True) -> None:
    """A new version of every group, written into copies where they may be."""
    renewed = set()
    for index, home in enumerate(homes):
        if renew and executor.change(index):
            assert home.bound is not None
            home.write(home.bound, home.version + 1)
            renewed.add(index)
    for home in homes:
        home.version += 1
    executor.committed(set(range(len(homes))), renewed)
    executor.end_step()


def reads_of_a_step(executor: Executor, homes: Sequence[Home], *, renew: bool = True, steps: int = 4) -> float:
    """Groups fetched by one of several equal steps, the first two apart."""
    for _ in range(2):
        there_and_back(executor, homes)
        update(executor, homes, renew=renew)
    before = sum(home.reads for home in homes)
    for _ in range(steps):
        there_and_back(executor, homes)
        update(executor, homes, renew=renew)
    return (sum(home.reads for home in homes) - before) / steps


@pytest.mark.parametrize("lookahead", [0, 1, 2, 64])
@pytest.mark.parametrize(("groups", "window"), [(6, 1), (6, 2), (6, 3), (6, 6), (5, 4), (1, 1)])
def test_a_step_reads_what_its_window_does_not_hold_from_the_step_before(
    groups: int, window: int, lookahead: int
) -> None:
    executor, homes = build(groups, window, lookahead=lookahead)
    # Of both passes the window holds as many groups at the turn, and now at the step's end, too.
    assert reads_of_a_step(executor, homes) == 2 * (groups - window)
    executor, homes = build(groups, window, lookahead=lookahead)
    assert reads_of_a_step(executor, homes, renew=False) == 2 * groups - window
    executor.close()


def test_bytes_that_were_kept_are_counted() -> None:
    executor, homes = build(4, 3)
    there_and_back(executor, homes)
    update(executor, homes)
    executor.take_counters()
    there_and_back(executor, homes)
    counters = executor.take_counters()
    assert (counters.kept_bytes, counters.fetched_bytes) == (3 * SIZE, 2 * SIZE)


def test_a_group_that_is_used_before_the_commit_has_its_old_values() -> None:
    executor, homes = build(2, 2)
    there_and_back(executor, homes)
    assert executor.change(0)
    assert homes[0].bound is not None
    homes[0].write(homes[0].bound, 2)
    executor.acquire(0)
    assert homes[0].seen == 1
    assert homes[0].reads == 2
    executor.committed({0, 1}, {0})  # the copy that was written into has gone: this one is stale
    assert homes[0].bound is None
    homes[0].version = 2
    executor.acquire(0)
    assert homes[0].seen == 2


def test_an_update_that_does_not_count_leaves_no_trace_in_copies() -> None:
    executor, homes = build(3, 3)
    there_and_back(executor, homes)
    for index in (0, 1):
        assert executor.change(index)
        homes[index].write(homes[index].bound, 9)  # type: ignore[arg-type]
    executor.changes_dropped()
    executor.end_step()
    there_and_back(executor, homes)
    assert [home.reads for home in homes] == [2, 2, 1]


def test_a_copy_that_is_in_use_is_not_changed() -> None:
    executor, homes = build(2, 2)
    executor.pin(0)
    assert not executor.change(0)
    assert not executor.change(1), "there is none"
    with pytest.raises(RuntimeError, match="g0 is in use"):
        executor.committed({0}, set())
    executor.unpin(0)
    assert executor.change(0)
    executor.close()
    assert homes[0].bound is None


def test_a_group_that_no_update_changed_is_kept_and_others_are_dropped() -> None:
    executor, homes = build(3, 3)
    there_and_back(executor, homes)
    executor.committed({1}, set())
    executor.end_step()
    assert [home.kept for home in homes] == [[False], [], [False]]
    there_and_back(executor, homes)
    assert [home.reads for home in homes] == [1, 2, 1]


def test_a_skipped_step_keeps_everything_and_the_next_one_follows_the_trace() -> None:
    executor, homes = build(4, 2)
    there_and_back(executor, homes)
    executor.end_step()
    for _ in range(3):
        there_and_back(executor, homes)
        executor.end_step()
    assert executor.counters.deviations == 0
    assert executor.counters.demand_fetches == 6, "those of the first step"


def test_a_kept_copy_makes_room_like_any_other() -> None:
    executor, homes = build(4, 2)
    there_and_back(executor, homes)
    update(executor, homes)
    for index in (3, 2):
        executor.acquire(index)
        assert homes[index].seen == 2
    executor.invalidate()
    assert executor.arena.used == 0


# -- simulated ---------------------------------------------------------------------------------------------------------


def model(sizes: Sequence[int], window: int, *, early: bool, renews: bool = True, compute_s: float = 0.01) -> StepModel:
    """Sizes in MiB; 12 bytes of state to 2 of parameters."""
    groups = tuple(
        GroupModel(name=f"g{index}", window_bytes=size * MIB, read_bytes=size * MIB) for index, size in enumerate(sizes)
    )
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    end = len(order) - 1
    updates = tuple(
        UpdateModel(
            name=f"u{index}",
            group=index,
            renews=renews,
            after=end - index if early else None,
            sub_groups=(SubGroup(read_bytes=6 * size * MIB, param_bytes=size * MIB, write_bytes=6 * size * MIB),),
        )
        for index, size in reversed(list(enumerate(sizes)))
    )
    return StepModel(
        groups=groups,
        accesses=tuple(Access(group=group, compute_s=compute_s) for group in order),
        updates=updates,
        window_bytes=window * MIB,
    )


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_simulated_step_reads_to_the_byte_what_is_neither_kept_nor_copied(window: int, early: bool) -> None:
    # Early: with so much compute that an update reads before its group's copy is evicted.
    compute_s = 1.0 if early else 0.01
    fast = links(64 * MIB, 64 * MIB)
    done = simulate(model([1] * 8, window, early=early, compute_s=compute_s), fast, steps=4)
    copied = 8 if early else window
    assert done.read_bytes == (2 * (8 - window) + 6 * 8 - copied) * MIB
    assert set(done.kept) == set(range(window))
    stale = simulate(model([1] * 8, window, early=early, compute_s=compute_s, renews=False), fast, steps=4)
    assert stale.read_bytes == (2 * 8 - window + 6 * 8) * MIB
    assert stale.kept == ()
    assert early or done.lower_bound_s < stale.lower_bound_s


ROUNDS = 12
COUNTED = slice(4, 9)
"""Of twelve equal steps: neither the first, which find nothing, nor the last, after which nothing comes."""


def fewest_fetches(order: Sequence[int], window: int) -> int:
    """Fetches of some of many equal steps with room for so many groups, by Belady's rule on the whole sequence."""
    sequence, held, fetches = list(order) * ROUNDS, set[int](), [0] * ROUNDS
    for at, group in enumerate(sequence):
        if group in held:
            continue
        fetches[at // len(order)] += 1
        if len(held) == window:
            rest = sequence[at + 1 :]
            held.remove(max(held, key=lambda other: rest.index(other) if other in rest else len(sequence)))
        held.add(group)
    return sum(fetches[COUNTED])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(2, 4))
def test_copies_are_chosen_as_well_as_can_be_with_one_group_in_use(order: list[int], window: int) -> None:
    order = [group for index, group in enumerate(order) if index == 0 or order[index - 1] != group]
    executor, homes = build(5, window)
    fetched = []
    for _ in range(ROUNDS):
        before = sum(home.reads for home in homes)
        for index in order:
            executor.acquire(index)
            assert homes[index].seen == homes[index].version
        fetched.append(sum(home.reads for home in homes) - before)
        update(executor, homes)
    assert sum(fetched[COUNTED]) <= fewest_fetches(order, window - 1), "the group in use cannot make room for the next"


def test_simulation_and_executor_fetch_the_same() -> None:
    for groups, window in product((3, 5), (1, 2, 3)):
        executor, homes = build(groups, window)
        done = simulate(model([1] * groups, window, early=False), links(64 * MIB, 64 * MIB), steps=4)
        assert done.fetches == reads_of_a_step(executor, homes), (groups, window)


@dataclass(frozen=True)
class LetGoMeanwhile:
    """A clock under which whoever sleeps finds that nothing is held any more."""

    held: list[memoryview]
    perf_counter: Callable[[], float] = time.perf_counter

    def sleep(self, _: float) -> None:
        self.held.clear()


@pytest.mark.parametrize(("alike", "still_there"), [(True, [0]), (False, [])])
def test_ranks_wait_for_memory_instead_of_evicting_more(
    alike: bool, still_there: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds an evicted copy's memory for a moment is a matter of time, which must not decide what is evicted."""
    executor, homes = build(3, 2)
    executor.alike = alike
    for index in (0, 1):
        executor.acquire(index)
    block = homes[1].bound
    assert block is not None
    held = [block.view]
    del block
    monkeypatch.setattr("lamina.tiers.schedule.executor.time", LetGoMeanwhile(held))
    executor.acquire(2)
    held.clear()
    assert [index for index in (0, 1) if homes[index].bound is not None] == still_there

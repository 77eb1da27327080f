"""Optimizer state that is read before its gradient is there: used when it is what comes next, never when it is not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_links import MIB, links
from test_update_thread import LIMIT_S, NUMEL, CountingKernels, HeldHandle, HeldStore, job

from lamina.tiers import Access, Arena, GroupModel, Plane, Spans, StepModel, SubGroup, Tier, UpdateModel, simulate
from lamina.zero.step.update import Updater
from lamina.zero.step.update_job import UpdateJob


class Store(HeldStore):
    """Every read fills its buffer with the number of the generation. ``reads``: those of this generation."""

    def __init__(self) -> None:
        super().__init__(lambda name: False)
        self.current = SimpleNamespace(id=1)
        self.reads: list[tuple[str, Plane]] = []
        self.written: dict[tuple[str, Plane], int] = {}

    @property
    def version(self) -> int:
        return int(self.current.id)

    def read(self, shard: str, plane: Plane, buffer: Any, **options: Any) -> HeldHandle:
        buffer[:] = bytes([self.current.id]) * len(buffer)
        with self.changed:
            self.reads.append((shard, plane))
            return super().read(shard, plane, buffer, **options)

    def write(self, shard: str, plane: Plane, buffer: Any, **options: Any) -> HeldHandle:
        self.written[shard, plane] = int(buffer[0])
        return super().write(shard, plane, buffer, **options)


def build(store: Store, buffers: int) -> Updater:
    arena = Arena(Tier.HOST, buffers * NUMEL * 12)
    return Updater(
        kernels=CountingKernels(),  # type: ignore[arg-type]
        store=store,  # type: ignore[arg-type]
        staging=[arena.alloc(NUMEL * 12, "staging") for _ in range(buffers)],
        sub_group_numel=NUMEL,
        spans=Spans(),
    )


def step(updater: Updater, store: Store, jobs: Sequence[UpdateJob], *, commit: bool = True) -> None:
    """An update of these segments, and the next generation."""
    for item in jobs:
        updater.submit(item, store)  # type: ignore[arg-type]
    updater.drain()
    if commit:
        store.current = SimpleNamespace(id=store.current.id + 1)
        store.reads.clear()
        updater.read_ahead()


def expect(store: Store, shard: str, reads: int) -> None:
    """Wait until a shard has been read so often in this generation."""
    with store.changed:
        assert store.changed.wait_for(lambda: sum(name == shard for name, _ in store.reads) == reads, LIMIT_S)


def segments(names: str) -> list[UpdateJob]:
    return [job(name) for name in names]


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_the_first_sub_groups_are_read_once_and_before_they_are_asked_for(buffers: int) -> None:
    store, jobs = Store(), segments("abc")
    updater = build(store, buffers)
    step(updater, store, jobs)
    ahead = min(buffers, 3)
    expect(store, "abc"[ahead - 1], 2)
    assert store.reads == [(name, plane) for name in "abc"[:ahead] for plane in (Plane.EXP_AVG, Plane.EXP_AVG_SQ)]
    step(updater, store, jobs, commit=False)
    assert sorted(store.reads) == sorted((name, plane) for name in "abc" for plane in Plane if plane in PLANES)
    assert set(store.written.values()) == {2}, "what was read is the generation that counts"
    updater.close()


PLANES = (Plane.PARAM, Plane.EXP_AVG, Plane.EXP_AVG_SQ)


def test_another_order_or_a_new_generation_is_read_as_usual() -> None:
    store, jobs = Store(), segments("abc")
    updater = build(store, 2)
    step(updater, store, jobs)
    step(updater, store, jobs[::-1])
    assert set(store.written.values()) == {2}
    expect(store, "b", 2)
    store.current = SimpleNamespace(id=9)  # somebody has written state of his own
    step(updater, store, jobs[::-1], commit=False)
    assert set(store.written.values()) == {9}
    updater.close()


def test_segments_that_are_gone_do_no_harm() -> None:
    store = Store()
    updater = build(store, 2)
    step(updater, store, segments("ab"))
    step(updater, store, segments("xyz"))
    assert {name for name, _ in store.written} == set("abxyz")
    assert store.written["x", Plane.EXP_AVG] == 2
    updater.close()


def test_a_read_that_failed_is_told_by_the_update_that_needs_it_and_not_by_another() -> None:
    store, jobs = Store(), segments("ab")
    updater = build(store, 1)
    step(updater, store, jobs)
    expect(store, "a", 2)
    for handle in store.handles[-2:]:
        handle.error = OSError("the disk is gone")
    step(updater, store, jobs[1:])  # reads b: what was read of a is dropped
    expect(store, "b", 2)
    store.handles[-1].error = OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        step(updater, store, jobs[1:])
    step(updater, store, jobs)
    updater.close()


def test_a_simulated_step_reads_ahead_too() -> None:
    """A barrier: under ten seconds of compute the last three writes of the step before end and the states of three of eight
    sub-groups come, and the update is shorter by them."""
    parts = tuple(SubGroup(read_bytes=MIB, write_bytes=MIB, adam_s=0.0) for _ in range(8))
    model = StepModel(
        groups=(GroupModel(name="all"),),
        accesses=(Access(group=0, compute_s=10.0),),
        updates=(UpdateModel(name="u", sub_groups=parts),),
        buffer_count=3,
    )
    first, second = (simulate(model, links(), steps=steps) for steps in (1, 2))
    assert first.step_s == pytest.approx(10.0 + 8.0 + 5.0)
    assert second.step_s == pytest.approx(10.0 + 5.0 + 5.0)
    assert second.barrier_bound_s == pytest.approx(10.0 + 16.0 - 6.0)
    assert first.read_bytes == second.read_bytes == 8 * MIB


def test_parameters_are_left_for_later() -> None:
    store, item = Store(), job("a")
    updater = build(store, 1)
    step(updater, store, [item])
    expect(store, "a", 2)
    item.segment.flat = torch.full((NUMEL,), 7.0)
    item.segment.shard_of = lambda flat: flat  # type: ignore[method-assign]
    store.reads.clear()
    step(updater, store, [item], commit=False)
    assert store.reads == [], "the parameters were copied, the rest was there"
    assert updater.counters.cached_bytes == 4 * NUMEL
    updater.close()

"""The update thread against a store whose transfers end when the test says so: order, overlap, failures, closing."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ctrl_c import ctrl_c_soon

from lamina.tiers import Arena, Plane, PlaneSpec, Spans, Tier
from lamina.zero.adam.update import AdamBatch, AdamHyper
from lamina.zero.step.update import Updater
from lamina.zero.step.update_job import UpdateJob

NUMEL = 4096
LIMIT_S = 60.0  # for what happens at once, however slow the machine is
PLANES = tuple(PlaneSpec(plane=plane, itemsize=4) for plane in (Plane.PARAM, Plane.EXP_AVG, Plane.EXP_AVG_SQ))


class HeldHandle:
    """A transfer that ends when it is let go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = threading.Event()
        self.error: OSError | None = None

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        assert self.ended.wait(LIMIT_S if timeout is None else timeout), f"{self.name} was waited for and never let go"
        if self.error is not None:
            raise self.error
        return 0


class HeldStore:
    """Store and transaction in one; what is to be held is decided by name."""

    version = 0

    def __init__(self, held: Callable[[str], bool]) -> None:
        self._holds = held
        self._let_go: dict[str, OSError | None] = {}
        self.handles: list[HeldHandle] = []
        self.changed = threading.Condition()

    def _handle(self, name: str) -> HeldHandle:
        handle = HeldHandle(name)
        with self.changed:
            if not self._holds(name) or name in self._let_go:
                handle.error = self._let_go.get(name)
                handle.ended.set()
            self.handles.append(handle)
            self.changed.notify_all()
        return handle

    def read(self, shard: str, plane: Plane, buffer: Any, **_: Any) -> HeldHandle:
        return self._handle(f"read {shard}")

    def write(self, shard: str, plane: Plane, buffer: Any, **_: Any) -> HeldHandle:
        return self._handle(f"write {shard}")

    def started(self, name: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: any(handle.name == name for handle in self.handles), LIMIT_S)

    def let_go(self, name: str, error: OSError | None = None) -> None:
        """End all transfers of this name, those that are yet to begin, too."""
        with self.changed:
            self._let_go[name] = error
            for handle in self.handles:
                if handle.name == name:
                    handle.error = error
                    handle.ended.set()


class CountingKernels:
    def __init__(self) -> None:
        self.elements = 0

    def adam_batch(self, batch: AdamBatch) -> None:
        self.elements += sum(batch.args[index].n for index in range(len(batch)))


def job(name: str, done: Callable[[UpdateJob], None] = lambda job: None) -> UpdateJob:
    gradient = torch.zeros(NUMEL)
    segment = SimpleNamespace(
        name=name,
        group=0,
        planes=PLANES,
        stored_planes=PLANES,
        dtype=torch.float32,
        home=None,
        device_home=None,
        device=None,
        flat=None,
        in_place=False,
        state={},
        kept=0,
        numel_in_place=0,
        layout=SimpleNamespace(shard_numel=NUMEL),
        address=lambda plane: 0,
    )
    plane = SimpleNamespace(address=gradient.data_ptr(), dtype=torch.float32, complete=True, keep=gradient)
    runs = [SimpleNamespace(begin=0, end=NUMEL, hyper=AdamHyper(lr=0.1, step=1))]
    return UpdateJob(segment=segment, gradient=plane, runs=runs, grad_multiplier=1.0, done=done)  # type: ignore[arg-type]


def build(store: HeldStore, *, buffers: int = 2) -> tuple[Updater, CountingKernels, Arena]:
    arena = Arena(Tier.HOST, buffers * NUMEL * 12)
    staging = [arena.alloc(NUMEL * 12, "staging") for _ in range(buffers)]
    kernels = CountingKernels()
    updater = Updater(
        kernels=kernels,  # type: ignore[arg-type]
        store=store,  # type: ignore[arg-type]
        staging=staging,
        sub_group_numel=NUMEL,
        spans=Spans(),
    )
    return updater, kernels, arena


def submit(updater: Updater, store: HeldStore, *jobs: UpdateJob) -> None:
    for item in jobs:
        updater.submit(item, store)  # type: ignore[arg-type]


def test_a_job_that_comes_while_another_is_written_is_read_at_once() -> None:
    store = HeldStore(lambda name: name == "write a")
    updater, kernels, _ = build(store)
    submit(updater, store, job("a"))
    assert store.started("write a")
    submit(updater, store, job("b"))
    assert store.started("write b"), "its buffer was free, so nothing had to be waited for"
    store.let_go("write a")
    updater.drain()
    assert kernels.elements == 2 * NUMEL
    updater.close()


def test_draining_waits_for_the_last_write() -> None:
    store = HeldStore(lambda name: name == "write a")
    updater, _, _ = build(store)
    submit(updater, store, job("a"))
    drained = threading.Thread(target=updater.drain)
    drained.start()
    assert store.started("write a")
    time.sleep(0.05)
    assert drained.is_alive()
    store.let_go("write a")
    drained.join(LIMIT_S)
    assert not drained.is_alive()
    updater.close()


def test_a_failed_transfer_is_told_once_and_later_jobs_are_let_go() -> None:
    done: list[str] = []
    store = HeldStore(lambda name: name == "read a")
    updater, kernels, _ = build(store, buffers=1)
    submit(updater, store, *(job(name, lambda item: done.append(item.segment.name)) for name in "abc"))
    assert store.started("read a")
    store.let_go("read a", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        updater.drain()
    assert kernels.elements == 0
    updater.drain()
    submit(updater, store, job("d", lambda item: done.append(item.segment.name)))
    updater.drain()
    assert done[-1] == "d"
    assert kernels.elements == NUMEL
    updater.close()


def test_closing_waits_for_transfers_under_way() -> None:
    store = HeldStore(lambda name: name == "write a")
    updater, _, _ = build(store)
    submit(updater, store, job("a"))
    assert store.started("write a")
    closed = threading.Thread(target=updater.close)
    closed.start()
    time.sleep(0.05)
    assert closed.is_alive(), "its buffer would be given back under the write"
    store.let_go("write a")
    closed.join(LIMIT_S)
    assert not closed.is_alive()


def test_ctrl_c_while_closing_does_not_give_buffers_back_early() -> None:
    store = HeldStore(lambda name: name == "write a")
    updater, _, _ = build(store)
    waits: list[bool] = []

    class Ended(threading.Event):
        """Ctrl-C comes when it is first waited for; the write ends when it is waited for again."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(self.is_set())
            if len(waits) > 1:
                store.let_go("write a")
                return super().wait(timeout)
            with ctrl_c_soon():
                return super().wait(timeout)

    updater._ended = Ended()
    submit(updater, store, job("a"))
    assert store.started("write a")
    with pytest.raises(KeyboardInterrupt):
        updater.close()
    assert waits == [False, False]
    assert updater._ended.is_set()


def test_one_buffer_carries_any_number_of_jobs() -> None:
    store = HeldStore(lambda name: False)
    updater, kernels, _ = build(store, buffers=1)
    submit(updater, store, *(job(str(index)) for index in range(20)))
    updater.drain()
    assert kernels.elements == 20 * NUMEL
    order = [handle.name for handle in store.handles[::3]]
    assert order == [f"{verb} {index}" for index in range(20) for verb in ("read", "write")]
    updater.close()

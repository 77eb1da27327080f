"""A step's last writes and its commit go on after step() has returned: what may use it meanwhile, and what a failure does."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings, train_steps
from train_until_killed import hold_commit

from lamina.engine import TrainingEngine, initialize
from lamina.tiers.errors import StorageFault, fault
from lamina.zero import GatheredParameters, get_full, set_full

SMALL = {"width": 16, "hidden": 32, "blocks": 3}
FULL = StorageFault("No space left on device", errno=errno.ENOSPC, path="/x")


def start(folder: Path, *, clip: float = 0, resume: bool = False, **tiers: Any) -> TrainingEngine:
    config = settings(gradient_clipping=clip, **on_nvme(folder, keep_state=True, **tiers))
    return initialize(build(**SMALL), config=config, resume=resume or None)[0]


def update(engine: TrainingEngine, loss: torch.Tensor) -> None:
    engine.backward(loss)
    engine.step()


def state(engine: TrainingEngine) -> list[Any]:
    return [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg", "exp_avg_sq")]


def in_time(call: Callable[[], object], event: threading.Event) -> bool:
    """Whether a call returns before the event lets the commit go on, which happens then."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.05)
    returned = not thread.is_alive()
    event.set()
    thread.join()
    return returned


@pytest.mark.parametrize("tiers", [{}, {"device_bytes": 40_000}], ids=["kept copies", "small window"])
def test_the_next_forward_pass_runs_meanwhile_and_what_needs_the_commit_waits(
    tmp_path: Path, tiers: dict[str, Any]
) -> None:
    with start(tmp_path / "straight", **tiers) as engine:
        wanted = train_steps(engine, 0, 2)
        after_two = state(engine)
        wanted += train_steps(engine, 2, 5)
    with start(tmp_path / "held", **tiers) as engine:
        parameter = next(iter(engine.module.parameters()))
        losses = train_steps(engine, 0, 1)
        event = hold_commit(engine, 2)
        losses += train_steps(engine, 1, 2)
        with torch.no_grad():
            assert engine(*batch(2)).item() == wanted[2]  # out of a generation that does not count yet
        assert all(map(torch.equal, state(engine), after_two))
        assert not in_time(lambda: engine.save_checkpoint(tmp_path / "c"), event)
        event = hold_commit(engine, 3)
        losses += train_steps(engine, 2, 3)
        values = get_full(parameter, "param")
        assert values is not None
        assert not in_time(lambda: set_full(parameter, "param", values), event)
        event = hold_commit(engine, 4)
        losses += train_steps(engine, 3, 4)
        assert not in_time(lambda: losses.extend(train_steps(engine, 4, 5)), event)
    assert losses == wanted


@pytest.mark.parametrize("clip", [0, 1.0])
def test_a_failure_is_told_by_the_next_call_and_the_step_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    def refuse(*_: object) -> None:
        raise FULL

    with start(tmp_path / "straight", clip=clip) as engine:
        wanted = train_steps(engine, 0, 5)
    engine = start(tmp_path / "full", clip=clip)
    assert train_steps(engine, 0, 2) == wanted[:2]
    engine.save_checkpoint(tmp_path / "c")
    store = engine.runtime.store
    assert store is not None
    store.settle()
    with monkeypatch.context() as patched:
        patched.setattr(store, "publish", refuse)
        assert train_steps(engine, 2, 3) == wanted[2:3]
        assert (engine.global_steps, engine.metrics().step) == (3, 3)
        with pytest.raises(StorageFault, match="No space left"):
            store.settle()
    with pytest.raises(StorageFault, match="No space left"):
        engine(*batch(3))
    for use in (lambda: engine(*batch(3)), engine.step, lambda: engine.save_checkpoint(tmp_path / "other")):
        with pytest.raises(RuntimeError, match=r"could not be committed.*load a checkpoint to go on, or start again"):
            use()
    engine.load_checkpoint(tmp_path / "c")
    assert train_steps(engine, 2, 4) == wanted[2:4]
    store.settle()
    with monkeypatch.context() as patched:
        patched.setattr(store, "publish", refuse)
        assert train_steps(engine, 4, 5) == wanted[4:]
        with pytest.raises(StorageFault, match="No space left"):
            engine.close()
    with start(tmp_path / "full", clip=clip, resume=True) as engine:
        assert engine.global_steps == 4
        assert train_steps(engine, 4, 5) == wanted[4:]


def test_an_edit_that_meets_a_failure_tells_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FULL

    with start(tmp_path) as engine:
        train_steps(engine, 0, 1)
        parameter, store = next(iter(engine.module.parameters())), engine.runtime.store
        values = get_full(parameter, "param")
        assert store is not None
        assert values is not None
        store.settle()
        with monkeypatch.context() as patched:
            patched.setattr(store, "publish", refuse)
            train_steps(engine, 1, 2)
            with pytest.raises(StorageFault, match="No space left"):
                set_full(parameter, "param", values)
        for use in (
            lambda: set_full(parameter, "param", values),
            lambda: get_full(parameter, "param"),
            lambda: GatheredParameters(engine.module).__enter__(),
            lambda: engine(*batch(2)),
        ):
            with pytest.raises(RuntimeError, match=r"could not be committed.*No space left.*load a checkpoint"):
                use()


INTACT = r"last committed generation is intact: free space or give another path in tiers\.nvme, and "


@pytest.mark.parametrize(
    ("placed", "kept", "late", "early"),
    [
        ({}, True, "load a checkpoint to go on, or start again and resume", "go on from there: nothing has happened"),
        ({}, False, r"load a checkpoint to go on, since no later process finds it", "go on from there"),
        (
            {"param": "nvme", "optimizer": "cpu"},
            False,
            r"load a checkpoint to go on, since it does not hold the state of \S+, which is in memory only",
            r"load a checkpoint to go on, since the state of \S+, which is in memory only, may be half changed",
        ),
    ],
    ids=["kept", "not kept", "state in memory"],
)
def test_a_failure_tells_what_is_left_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: dict[str, str], kept: bool, late: str, early: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fault(OSError(errno.ENOSPC, "No space left on device", "/x"), "writing")

    for call, told in (("publish", late), ("begin", early)):
        config = settings(gradient_clipping=1.0, **on_nvme(tmp_path / call, keep_state=kept, **placed))
        with initialize(build(**SMALL), config=config)[0] as engine, monkeypatch.context() as patched:
            train_steps(engine, 0, 1)
            store = engine.runtime.store
            assert store is not None
            store.settle()
            patched.setattr(store, call, refuse)
            with pytest.raises(StorageFault, match=f"{INTACT}{told}"):
                train_steps(engine, 1, 3)


def test_it_may_fail_under_the_next_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the next step cannot begin then: its backward pass, or step(), says so."""
    for clip in (0, 1.0):
        engine = start(tmp_path / f"{clip}", clip=clip)
        train_steps(engine, 0, 1)
        store = engine.runtime.store
        assert store is not None
        store.settle()
        event = threading.Event()

        def refuse(*_: object, event: threading.Event = event) -> None:
            event.wait()
            raise FULL

        with monkeypatch.context() as patched:
            patched.setattr(store, "publish", refuse)
            train_steps(engine, 1, 2)
            loss = engine(*batch(2))
            event.set()
            with pytest.raises(StorageFault, match="No space left"):
                update(engine, loss)
        with pytest.raises(RuntimeError, match=r"could not be committed.*No space left.*load a checkpoint"):
            engine(*batch(2))
        engine.close()
        with start(tmp_path / f"{clip}", clip=clip, resume=True) as engine:
            assert engine.global_steps == 1
            with GatheredParameters(engine.module):
                assert all(parameter.isfinite().all() for parameter in engine.module.parameters())

"""Updates that step() does not wait for run under the next forward pass: same bits, and whoever reads what they write waits."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ctrl_c import ctrl_c_soon
from small_model import batch, build, on_nvme, settings, train_steps

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import PlacementQuestion, StoreError
from lamina.zero import GatheredParameters, get_full, set_full
from lamina.zero.homes.choosing import Decision, decide
from lamina.zero.step.update import Updater

SMALL = {"width": 64, "hidden": 256, "blocks": 5}
LATE = 2
"""Blocks, from the second last on."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def hold_late(monkeypatch: pytest.MonkeyPatch, number: int = LATE) -> None:
    """Let the gradients of some blocks wait, whatever would pay."""

    def decided(question: PlacementQuestion, *others: Any) -> Decision:
        decision = decide(question, *others)
        blocks = [s.name for s in question.segments if s.block]
        late = blocks[-1 - number : -1]
        homes = {name: replace(home, late=name in late) for name, home in decision.placement.homes.items()}
        return replace(decision, placement=question.placement_at(homes), choice=None)

    monkeypatch.setattr("lamina.zero.homes.residence.decide", decided)


def start(folder: Path, *, resume: bool = False, changes: dict[str, Any] | None = None, **tiers: Any) -> TrainingEngine:
    config = settings(**on_nvme(folder, keep_state=True, **tiers), **(changes or {}))
    return initialize(build(**SMALL), config=config, resume=resume or None)[0]


def state(engine: TrainingEngine) -> list[Any]:
    return [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg", "exp_avg_sq")]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(map(torch.equal, left, right))


def settled(engine: TrainingEngine) -> threading.Event:
    """An event, once nothing is late any more."""
    store = engine.runtime.store
    assert store is not None
    store.settle()
    return threading.Event()


@contextmanager
def held(engine: TrainingEngine) -> Iterator[threading.Event]:
    """Late updates that are asked for inside compute only once the event is set."""
    event, updater = settled(engine), engine.runtime.updater
    adam = updater._adam

    def wait(job: Any, *rest: Any) -> None:
        if job.late:
            event.wait()
        adam(job, *rest)

    updater._adam = wait  # type: ignore[method-assign]
    try:
        yield event
    finally:
        event.set()
        del updater._adam


def late_parameter(engine: TrainingEngine) -> torch.nn.Parameter:
    segment = next(s for s in engine.runtime.segments if s.late)
    return segment.parameters[0]  # type: ignore[return-value]


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"device_bytes": 800_000, "host_bytes": 3_500_000}, {}),
    ({"device_bytes": 800_000, "host_bytes": 3_500_000}, {"bf16": {"enabled": True}}),
    ({}, {"gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("tiers", "changes"), CASES, ids=["kept copies", "small window", "bf16", "accumulation"])
def test_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: dict[str, Any], changes: dict[str, Any]
) -> None:
    with start(tmp_path / "straight", changes=changes, **tiers) as engine:
        assert not any(s.late for s in engine.runtime.segments)
        wanted = train_steps(engine, 0, 6)
        after = state(engine)
    hold_late(monkeypatch)
    with start(tmp_path / "late", changes=changes, **tiers) as engine:
        assert sum(s.late for s in engine.runtime.segments) == LATE
        assert train_steps(engine, 0, 6) == wanted
        assert same(state(engine), after)
        assert engine.runtime.host.peak <= engine.runtime.host.nbytes
    with start(tmp_path / "late", changes=changes, resume=True, **tiers) as engine:
        assert same(state(engine), after)


def finishes(call: Callable[[], object], event: threading.Event) -> tuple[bool, list[Any]]:
    """Whether a call returns before the event lets the late updates go on, which happens then; and what it returned."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(0.1)
    returned = not thread.is_alive()
    event.set()
    thread.join()
    return returned, found


def whole(engine: TrainingEngine) -> list[torch.Tensor]:
    with GatheredParameters(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


READERS: dict[str, Callable[[TrainingEngine, Path], Any]] = {
    "forward": lambda engine, _: engine(*batch(2)).item(),
    "eval": lambda engine, _: engine.eval()(*batch(2)).item(),
    "param": lambda engine, _: get_full(late_parameter(engine), "param"),
    "moment": lambda engine, _: get_full(late_parameter(engine), "exp_avg_sq"),
    "gathered": lambda engine, _: torch.cat([p.flatten() for p in whole(engine)]),
    "written": lambda engine, _: set_full(late_parameter(engine), "exp_avg", torch.ones(64)),
    "checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "c") and None,
    "pretrained": lambda engine, folder: engine.save_pretrained(folder / "p") and None,
    "update": lambda engine, _: engine.runtime.optimizer.finish(step=3),  # type: ignore[union-attr]
    "close": lambda engine, _: engine.close(),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_what_is_late_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    read = READERS[reader]
    with start(tmp_path / "straight") as engine:
        train_steps(engine, 0, 2)
        hold_late(monkeypatch)
        for segment in engine.runtime.segments[3:5]:
            segment.late = True  # to name the same parameter
        wanted = read(engine, tmp_path / "straight") if reader not in ("written", "update", "close") else None
    with start(tmp_path / "late") as engine:
        train_steps(engine, 0, 1)
        with held(engine) as event:
            train_steps(engine, 1, 2)
            engine.set_lr(77.0)  # not for what is under way
            assert engine.global_steps == 2
            assert get_full(late_parameter(engine), "grad") is None
            returned, found = finishes(lambda: read(engine, tmp_path / "late"), event)
            assert not returned
            assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(wanted)) if wanted is not None else True


def test_what_is_not_late_need_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_late(monkeypatch)
    with start(tmp_path / "late") as engine, held(engine) as event:
        train_steps(engine, 0, 1)
        other = next(s for s in engine.runtime.segments if not s.late).parameters[0]
        assert finishes(lambda: get_full(other, "master"), event)[0]  # type: ignore[arg-type]


def test_steps_that_leave_groups_out_use_them_again_or_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of one process by turns."""

    def train(folder: Path) -> tuple[list[float], list[Any]]:
        with start(folder / "a") as engine, start(folder / "b") as other:
            losses = train_steps(engine, 0, 2)
            blocks = engine.module.blocks
            engine.module.blocks = torch.nn.ModuleList([*blocks[:3], blocks[4], blocks[1]])  # type: ignore[index]
            losses += train_steps(other, 0, 1) + train_steps(engine, 2, 4)
            engine.module.blocks = blocks
            engine.zero_grad()
            losses += train_steps(other, 1, 3) + train_steps(engine, 4, 5)
            engine.backward(engine(*batch(5)))
            engine.zero_grad()
            with torch.no_grad():
                losses.append(engine(*batch(6)).item())
            losses += train_steps(engine, 6, 8)
            return losses, state(engine) + state(other)

    losses, after = train(tmp_path / "straight")
    hold_late(monkeypatch)
    found, late = train(tmp_path / "late")
    assert found == losses
    assert same(late, after)


def test_a_failure_is_told_once_by_the_next_call_and_the_step_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path / "straight") as engine:
        wanted = train_steps(engine, 0, 5)
    hold_late(monkeypatch)
    engine = start(tmp_path / "late")
    assert train_steps(engine, 0, 2) == wanted[:2]
    engine.save_checkpoint(tmp_path / "c")
    adam = Updater._adam

    def fail(updater: Updater, job: Any, *rest: Any) -> None:
        if job.late:
            event.wait()
            raise OSError(5, "the disk is gone")
        adam(updater, job, *rest)

    with monkeypatch.context() as patched:
        event = settled(engine)
        patched.setattr(Updater, "_adam", fail)
        assert train_steps(engine, 2, 3) == wanted[2:3]
        event.set()
        with pytest.raises(StoreError, match=r"could not be written.*the disk is gone"):
            engine(*batch(3))
    for use in (lambda: engine(*batch(3)), engine.step):
        with pytest.raises(RuntimeError, match=r"could not be committed.*the disk is gone.*load a checkpoint to go on"):
            use()
    engine.load_checkpoint(tmp_path / "c")
    assert train_steps(engine, 2, 4) == wanted[2:4]
    with monkeypatch.context() as patched:
        event = settled(engine)
        patched.setattr(Updater, "_adam", fail)
        assert train_steps(engine, 4, 5) == wanted[4:]
        event.set()
        with pytest.raises(StoreError, match="the disk is gone"):
            engine.close()
    with start(tmp_path / "late", resume=True) as engine:
        assert engine.global_steps == 4
        assert train_steps(engine, 4, 5) == wanted[4:]


def test_ctrl_c_in_a_wait_for_a_late_update_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(tmp_path / "straight") as engine:
        wanted = train_steps(engine, 0, 4)
        after = state(engine)
    hold_late(monkeypatch)
    with start(tmp_path / "late") as engine:
        losses = train_steps(engine, 0, 1)
        with held(engine):
            losses += train_steps(engine, 1, 2)
            with pytest.raises(KeyboardInterrupt), ctrl_c_soon(0.1):
                engine(*batch(2))
        assert losses + train_steps(engine, 2, 4) == wanted
        assert same(state(engine), after)


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from typing import Any
import pytest, torch
sys.path[:0] = {path!r}
torch.set_num_threads(1)
from test_late_updates import hold_late, held, start, train_steps
with pytest.MonkeyPatch.context() as patched:
    hold_late(patched)
    engine = start(Path({folder!r}))
    train_steps(engine, 0, 2)
    with held(engine):
        train_steps(engine, 2, 3)
        print(engine.global_steps, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_under_a_late_update_leaves_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(tmp_path / "straight") as engine:
        wanted = train_steps(engine, 0, 2)
        after = state(engine)
        wanted += train_steps(engine, 2, 4)
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path], folder=str(tmp_path / "killed"))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("3\n", -signal.SIGKILL), done.stderr
    hold_late(monkeypatch)
    with start(tmp_path / "killed", resume=True) as engine:
        assert engine.global_steps == 2
        assert same(state(engine), after)
        assert train_steps(engine, 2, 4) == wanted[2:]


def test_what_is_read_ahead_of_a_late_update_is_of_the_generation_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read when a buffer came free only after the commit had begun, it waited for the update that waited for it."""
    with start(tmp_path / "straight") as engine:
        wanted = train_steps(engine, 0, 4)
    hold_late(monkeypatch)
    with start(tmp_path / "late") as engine:
        go_on, ahead = engine.runtime.updater._ahead.go_on, engine.runtime.updater._ahead
        store = engine.runtime.store
        assert store is not None

        def later(free: Any) -> None:
            if any(job.late for job in engine.runtime.updater._late) or store._landing is not None:
                go_on(free)

        ahead.go_on = later  # type: ignore[method-assign]
        assert train_steps(engine, 0, 4) == wanted

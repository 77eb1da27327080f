"""Ctrl-C or an error in the middle of a call: training goes on, with zero_grad() or from a checkpoint."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings, train_steps
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import Transaction

SMALL = {"width": 16, "hidden": 32, "blocks": 3}


def start(folder: Path, *, model: nn.Module | None = None, clip: float = 0, **tiers: Any) -> TrainingEngine:
    config = settings(gradient_clipping=clip, **on_nvme(folder, **tiers))
    return initialize(model or build(**SMALL), config=config)[0]


def test_a_step_that_is_cut_while_its_update_writes_is_dropped_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path / "state", clip=1.0) as engine:
        train_steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "c")
        wanted = train_steps(engine, 1, 3)
        store, go_on = engine.runtime.store, threading.Event()
        assert store is not None
        begin = store.begin

        def begin_late() -> Transaction:
            transaction = begin()
            write = transaction.write

            def late(*args: Any, **options: Any) -> Any:
                go_on.wait()
                return write(*args, **options)

            monkeypatch.setattr(transaction, "write", late)
            return transaction

        def cut() -> None:
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

        engine.backward(engine(*batch(3)))
        with monkeypatch.context() as patched:
            patched.setattr(store, "begin", begin_late)
            patched.setattr(engine.runtime.updater, "finish", cut)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        engine.load_checkpoint(tmp_path / "c")
        assert train_steps(engine, 1, 3) == wanted


def test_a_forward_pass_that_is_cut_keeps_nothing_in_use(tmp_path: Path) -> None:
    def cut(_module: nn.Module, _args: Any) -> None:
        raise KeyboardInterrupt

    with start(tmp_path / "straight") as engine:
        wanted = train_steps(engine, 0, 3)
    with start(tmp_path / "cut") as engine:
        losses = train_steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "c")
        hook = engine.module.get_submodule("blocks.1.down").register_forward_pre_hook(cut)
        with pytest.raises(KeyboardInterrupt):
            engine(*batch(1))
        hook.remove()
        losses += train_steps(engine, 1, 2)
        engine.runtime.executor.pin(0)  # as where Ctrl-C comes between taking a pin and noting it
        engine.zero_grad()
        losses += train_steps(engine, 2, 3)
        engine.runtime.executor.pin(0)
        engine.load_checkpoint(tmp_path / "c")
        assert losses == wanted
        assert train_steps(engine, 1, 3) == wanted[1:]


def test_another_backward_pass_after_one_that_was_cut_says_what_to_do(tmp_path: Path) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("a hook of the user's")

    def fail_at(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    with start(tmp_path / "straight", model=build()) as engine:
        wanted = train_steps(engine, 0, 2)
    with start(tmp_path / "cut", model=build(), host_bytes=3_000_000) as engine:
        losses = train_steps(engine, 0, 1)
        hook = engine.module.get_submodule("embed").register_forward_hook(fail_at)
        loss = engine(*batch(1))
        hook.remove()
        with pytest.raises(ValueError, match="a hook of the user's"):
            engine.backward(loss)
        loss = engine(*batch(1))
        with pytest.raises(
            RuntimeError, match=r"backward pass that was cut short.*call zero_grad\(\) to drop the window"
        ):
            engine.backward(loss)
        engine.zero_grad()
        assert losses + train_steps(engine, 1, 2) == wanted

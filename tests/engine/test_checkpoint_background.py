"""Checkpoints saved while training goes on: of the step that was saved, complete or not there, on any file system."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ctrl_c import ctrl_c_soon
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.tiers.nvme import pin
from lamina.zero import get_full


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm as a second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def engine_for(folder: Path, **how: Any) -> Any:
    return initialize(build(), config=settings(**on_nvme(folder, **how)))[0]


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        engine.backward(engine(*batch(index)))
        engine.step()


def state(engine: Any) -> list[torch.Tensor]:
    return [
        get_full(parameter, plane) for parameter in engine.module.parameters() for plane in ("master", "exp_avg_sq")
    ]


class Gate:
    """Holds copies back until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        original = pin.copy_stripe

        def waiting(*arguments: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            original(*arguments)

        patch.setattr(pin, "copy_stripe", waiting)


@pytest.mark.parametrize(
    "how", [{}, {"optimizer": "cpu"}, {"generations": 3}], ids=["nvme", "host state", "three kept"]
)
def test_another_file_system_gets_the_saved_step_while_training_goes_on(
    how: dict[str, Any], tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with engine_for(tmp_path, **how) as engine:
        train(engine, 0, 2)
        wanted = state(engine)
        path = engine.save_checkpoint(elsewhere, background=True)
        assert gate.reached.wait(60)
        train(engine, 2, 6)
        assert not os.path.exists(path)
        assert not (elsewhere / "latest").exists()
        with pytest.raises(KeyboardInterrupt), ctrl_c_soon():
            engine.wait_for_checkpoint()
        with pytest.raises(TimeoutError, match="not complete after"):
            engine.wait_for_checkpoint(timeout=0.01)
        gate.opened.set()
        assert engine.wait_for_checkpoint() == path
        assert engine.wait_for_checkpoint() is None
        assert sorted(os.listdir(elsewhere)) == ["global_step2", "latest"]
        straight = state(engine)
    with engine_for(tmp_path / "other", **how) as engine:
        assert engine.load_checkpoint(elsewhere)[0] == path
        assert all(map(torch.equal, state(engine), wanted))
        train(engine, 2, 6)
        assert all(map(torch.equal, state(engine), straight))


def test_the_same_file_system_links_and_goes_on(tmp_path: Path) -> None:
    with engine_for(tmp_path / "n") as engine:
        train(engine, 0, 2)
        wanted = state(engine)
        for tag in ("one", "two"):  # the second waits for the first
            engine.save_checkpoint(tmp_path / "c", tag=tag, background=True, keep_last=1)
            train(engine, engine.global_steps, engine.global_steps + 1)
        engine.load_checkpoint(tmp_path / "c")  # waits for the second
        assert engine.global_steps == 3
        assert sorted(os.listdir(tmp_path / "c")) == ["latest", "two"]
        engine.save_checkpoint(tmp_path / "c", tag="three", background=True)
    assert (tmp_path / "c" / "latest").read_text() == "three", "close() waits for it"
    with engine_for(tmp_path / "n") as engine:
        train(engine, 0, 2)
        assert all(map(torch.equal, state(engine), wanted))


def test_what_fails_in_the_background_is_told_once_and_leaves_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with engine_for(tmp_path) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(elsewhere, tag="good")
        with monkeypatch.context() as patched:
            patched.setattr(pin, "copy_stripe", full)
            engine.save_checkpoint(elsewhere, tag="bad", background=True)
            with pytest.raises(OSError, match="No space left"):
                engine.wait_for_checkpoint()
        assert engine.wait_for_checkpoint() is None
        assert sorted(os.listdir(elsewhere)) == ["good", "latest"]
        train(engine, 1, 2)
        engine.save_checkpoint(elsewhere, tag="better")
        assert (elsewhere / "latest").read_text() == "better"

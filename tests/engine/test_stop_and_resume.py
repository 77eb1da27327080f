"""Killed at any moment, training goes on from the store's last generation, bit-exactly; SIGINT and SIGTERM end it cleanly."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings
from torch.utils.data import Dataset
from train_until_killed import CUT, KILLED_WITHIN, STEPS, data, main, start

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import StoreError
from lamina.zero import get_full

SCRIPT = Path(__file__).with_name("train_until_killed.py")
SMALL = {"width": 16, "hidden": 32, "blocks": 2}
KILLS = 5


class Server:
    """The forking script."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, folder: Path, mode: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {mode}\n")
        self._process.stdin.flush()
        return int(self.line().split()[1])

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server ended"
        return line.strip()

    def rest(self) -> tuple[list[str], int]:
        """Lines until the child is gone, and its exit code."""
        lines = []
        while not (line := self.line()).startswith("gone"):
            lines.append(line)
        return lines, int(line.split()[1])


@pytest.fixture
def server() -> Iterator[Server]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


def test_killed_over_and_over_it_goes_on_bit_exactly(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, rates and random numbers of every step that was told are those of a run that nobody killed."""
    assert KILLS * KILLED_WITHIN < STEPS, "something is left to be done at the end"
    main(tmp_path / "straight", "resume")
    wanted = capsys.readouterr().out.split("\n")[:STEPS]
    chance, told, kills = random.Random(1), set(), 0
    while True:
        child = server.start(tmp_path / "killed", "killed" if kills < KILLS else "resume")
        if kills < KILLS:
            first = server.line()
            time.sleep(chance.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            lines, code = server.rest()
            lines.append(first)
            kills += 1
        else:
            lines, code = server.rest()
        told |= {line for line in lines if line.startswith("step")}
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert told <= set(wanted)
    assert wanted[-1] in told
    engines = [start(tmp_path / name, resume=True) for name in ("straight", "killed")]
    states = []
    for engine in engines:
        with engine:
            parameters = list(engine.module.parameters())
            states.append([get_full(p, plane) for p in parameters for plane in ("master", "exp_avg", "exp_avg_sq")])
    assert all(map(torch.equal, *states))


def test_killed_after_a_step_and_before_its_commit_it_does_that_step_again(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(tmp_path / "straight", "resume")
    wanted = capsys.readouterr().out.split("\n")[:STEPS]
    server.start(tmp_path / "killed", "cut")
    assert server.rest() == (wanted[:CUT], -signal.SIGKILL)
    server.start(tmp_path / "killed", "resume")
    assert server.rest() == (wanted[CUT - 1 :], 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signals_end_the_micro_batch_save_and_release(
    number: signal.Signals, code: int, server: Server, tmp_path: Path
) -> None:
    child = server.start(tmp_path, "stopped")
    first = server.line()
    assert server.line() == "inside"
    os.kill(child, number)
    lines, found = server.rest()
    assert found == code
    assert first.startswith("step 1 ")
    assert lines == []  # the loop was left before it told
    assert (tmp_path / "c" / "latest").read_text() == "global_step1"
    with start(tmp_path, resume=True) as engine:  # the lock was given back
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
    with start(tmp_path, resume=False) as engine:
        engine.load_checkpoint(tmp_path / "c")
        assert (engine.global_steps, engine.micro_steps) == (1, 3)  # the micro-batch under way was ended
        assert engine.training_dataloader.batches == 3


class Interrupting(Dataset[Any]):
    """Sends this process a signal when item number ``at`` (in the order of use) is drawn."""

    def __init__(self, at: int | None) -> None:
        self.rest = data()
        self.drawn = 0
        self.at = at

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, index: int) -> Any:
        self.drawn += 1
        if self.drawn == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.rest[index]


@pytest.mark.parametrize("at", [5, 7])
def test_a_signal_while_data_is_drawn_acts_at_once_and_no_batch_is_lost(at: int, tmp_path: Path) -> None:
    """In the first and in the second micro-batch of the second step; a checkpoint carries the open window."""

    def begin(at: int | None) -> TrainingEngine:
        torch.manual_seed(0)
        config = settings(gradient_accumulation_steps=2, **on_nvme(tmp_path / "n"))
        return initialize(build(**SMALL), config=config, training_data=Interrupting(at), save_on_stop=tmp_path / "c")[0]

    def end(engine: TrainingEngine) -> list[torch.Tensor | None]:
        while engine.global_steps < 4:
            engine.train_batch()
        return [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg")]

    with begin(None) as engine:
        wanted = end(engine)
    engine = begin(at)
    with pytest.raises(SystemExit):
        end(engine)
    with begin(None) as engine:
        engine.load_checkpoint(tmp_path / "c")
        assert (engine.global_steps, engine.micro_steps) == (1, (at - 1) // 2)
        assert all(map(torch.equal, end(engine), wanted))


def test_a_signal_between_windows_acts_at_once_and_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    engine = initialize(build(**SMALL), config=settings())[0]
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    with pytest.raises(SystemExit) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    with pytest.raises(RuntimeError, match="the engine was closed"):
        engine(*batch(0))
    assert {number: signal.getsignal(number) for number in before} == before
    with initialize(build(**SMALL), config=settings(), handle_signals=False)[0]:
        assert {number: signal.getsignal(number) for number in before} == before


def test_handlers_of_an_engine_that_another_thread_closed_give_way() -> None:
    def closed_elsewhere() -> None:
        thread = threading.Thread(target=initialize(build(**SMALL), config=settings())[0].close)
        thread.start()
        thread.join()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    closed_elsewhere()
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in before} == before
    closed_elsewhere()
    engine = initialize(build(**SMALL), config=settings())[0]
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RuntimeError, match="the engine was closed"):
        engine(*batch(0))
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with initialize(build(**SMALL), config=settings())[0] as engine:
        engine.backward(engine(*batch(0)))
        os.kill(os.getpid(), signal.SIGINT)
        assert "SIGINT: the micro-batch under way is ended first" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with initialize(build(**SMALL), config=settings())[0] as engine:
        engine.backward(engine(*batch(0)))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.global_steps == 1


def test_kept_state_is_never_dropped_unless_told_to(tmp_path: Path) -> None:
    with start(tmp_path, resume="auto") as engine:
        engine.train_batch()
    with pytest.raises(StoreError, match=r"kept the state of step 1: pass resume=True"):
        start(tmp_path)
    with start(tmp_path, resume=True) as engine:
        assert engine.global_steps == 1
    with start(tmp_path, resume=False) as engine:
        assert engine.global_steps == 0
    with pytest.raises(StoreError, match="no committed state"):
        start(tmp_path / "other", resume=True)
    with pytest.raises(ValueError, match=r"resume needs tiers\.keep_state"):
        initialize(build(**SMALL), config=settings(**on_nvme(tmp_path / "third")), resume=True)
    placed = on_nvme(tmp_path / "fourth", keep_state=True, optimizer="cpu")
    with initialize(build(**SMALL), config=settings(**placed))[0]:
        pass
    with pytest.raises(StoreError, match="placed in memory, which did not survive"):
        initialize(build(**SMALL), config=settings(**placed), resume=True)


def test_a_checkpoint_loaded_into_kept_state_can_be_resumed_too(tmp_path: Path) -> None:
    with start(tmp_path / "a", resume="auto") as engine:
        for _ in range(3):
            engine.train_batch()
        engine.save_checkpoint(tmp_path / "c")
        wanted = [engine.train_batch().item() for _ in range(2)]
    with start(tmp_path / "b", resume="auto") as engine:
        engine.load_checkpoint(tmp_path / "c")
    with start(tmp_path / "b", resume=True) as engine:
        assert engine.global_steps == 3
        assert [engine.train_batch().item() for _ in range(2)] == wanted


def test_a_failed_step_with_state_on_nvme_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached parameters that the failed step had updated are read again; with state in memory the engine refuses."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    losses = []
    for failing in (True, False):
        with initialize(build(**SMALL), config=settings(**on_nvme(tmp_path, param="none")))[0] as engine:
            if failing:
                engine.backward(engine(*batch(0)))
                with monkeypatch.context() as patched:
                    patched.setattr("lamina.tiers.Transaction.commit", fail)
                    with pytest.raises(OSError, match="No space left"):
                        engine.step()
            for index in range(3):
                loss = engine(*batch(index))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]
    with initialize(build(**SMALL), config=settings(**on_nvme(tmp_path, optimizer="cpu")))[0] as engine:
        engine.save_checkpoint(tmp_path / "c")
        engine.backward(engine(*batch(0)))
        with monkeypatch.context() as patched:
            patched.setattr("lamina.tiers.Transaction.commit", fail)
            with pytest.raises(OSError, match="No space left"):
                engine.step()
        with pytest.raises(RuntimeError, match="load a checkpoint to go on"):
            engine(*batch(0))
        engine.load_checkpoint(tmp_path / "c")
        assert engine(*batch(0)).item() == losses[0]


@pytest.mark.parametrize("ending", ["", "raise ValueError('mine')"])
def test_a_script_that_never_closes_leaves_nothing_behind(ending: str, tmp_path: Path) -> None:
    script = f"""
import sys
from small_model import batch, build, on_nvme, settings
from lamina.engine import initialize
engine = initialize(build(width=16, hidden=32, blocks=2), config=settings(**on_nvme({str(tmp_path)!r})))[0]
engine.backward(engine(*batch(0)))
engine.step()
{ending}
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    run = subprocess.run([sys.executable, "-c", script], env=env, check=False, capture_output=True, text=True)
    assert run.returncode == (1 if ending else 0), run.stderr
    assert ("mine" in run.stderr) == ("mine" in ending)
    assert list(tmp_path.iterdir()) == []

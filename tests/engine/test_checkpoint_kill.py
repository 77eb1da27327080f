"""SIGKILL at random moments of saving: `latest` always loads, and it is bit-exactly a step of the straight run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_model import batch, build, settings

from lamina.engine import initialize
from lamina.zero import get_full

SMALL = {"width": 16, "hidden": 32, "blocks": 2}
SCRIPT = Path(__file__).with_name("kill_while_saving.py")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_and_kill(server: subprocess.Popen[str], folder: Path, number: int, after_s: float) -> int:
    """Kill the child ``after_s`` after it saved for the first time; the last step it told."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{folder} {number}\n")
    server.stdin.flush()
    lines, child = [], 0
    while not (child and any(line.strip().isdigit() for line in lines)):
        lines.append(server.stdout.readline())
        assert lines[-1] not in ("", "gone\n"), f"round {number}: the child ended before it had saved"
        if lines[-1].startswith("pid "):
            child = int(lines[-1].split()[1])
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    while lines[-1] != "gone\n":
        lines.append(server.stdout.readline())
        assert lines[-1], f"round {number}: the server ended"
    return [int(line) for line in lines if line.strip().isdigit()][-1]


class StraightRun:
    """Plain training in memory, step by step, as the reference."""

    def __init__(self) -> None:
        self.model = build(**SMALL)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        self.step = 0

    def at(self, step: int) -> list[torch.Tensor]:
        while self.step < step:
            self.model(*batch(self.step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return [parameter.detach() for parameter in self.model.parameters()]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rounds", [pytest.param(20), pytest.param(200, marks=pytest.mark.slow)])
def test_latest_always_loads(rounds: int, server: subprocess.Popen[str], tmp_path: Path) -> None:
    chance = random.Random(rounds)
    straight = StraightRun()
    engine, _, _, _ = initialize(build(**SMALL), config=settings())
    reached = 0
    with engine:
        for number in range(rounds):
            told = run_and_kill(server, tmp_path, number, chance.uniform(0, 0.1))
            path, _ = engine.load_checkpoint(tmp_path / "c")
            assert path is not None, f"round {number}"
            assert engine.global_steps >= max(told, reached), f"round {number}"
            reached = engine.global_steps
            found = [get_full(parameter, "master") for parameter in engine.module.parameters()]
            assert all(map(torch.equal, found, straight.at(reached))), f"round {number}, step {reached}"
    left = [name for name in os.listdir(tmp_path / "c") if name.startswith(".")]
    assert len(left) <= 2, left


def test_every_cut_of_one_save_leaves_latest_loadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before each single change of the file system in turn, as a kill would: what is there must load."""
    calls = {"rename": os.rename, "mkdir": os.mkdir, "unlink": os.unlink, "rmdir": os.rmdir, "fsync": os.fsync}

    class Cut(BaseException):
        pass

    engine, _, _, _ = initialize(build(**SMALL), config=settings())
    cut_at, finished = 0, False
    with engine:
        while not finished:
            folder = tmp_path / str(cut_at)
            engine.save_checkpoint(folder, tag="same", client_state={"number": 1})
            left = cut_at

            def counted(name: str) -> object:
                def call(*arguments: object, **options: object) -> object:
                    nonlocal left
                    if left == 0:
                        raise Cut(name)
                    left -= 1
                    return calls[name](*arguments, **options)

                return call

            with monkeypatch.context() as patched:
                for name in calls:
                    patched.setattr(os, name, counted(name))
                patched.setattr("lamina.engine.checkpoint.folder.abandon", lambda _partial: None)
                try:
                    engine.save_checkpoint(folder, tag="same", client_state={"number": 2})
                    finished = True
                except Cut:
                    pass
            path, state = engine.load_checkpoint(folder)
            assert path is not None
            assert state["number"] in (1, 2)
            assert not finished or state["number"] == 2
            cut_at += 1
    assert cut_at > 10

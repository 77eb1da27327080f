"""SIGKILL at random moments: a reopening finds a committed generation, whole, or the one after it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_rounds.py")


def kill_rounds(
    folder: Path, rounds: int, *, seed: int, generations: int, paths: int, longest_s: float, pin: bool
) -> dict[str, int]:
    arguments = [str(folder), str(rounds), str(seed), str(generations), str(paths), str(longest_s)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, *(["pin"] if pin else [])],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    assert found["rounds"] == rounds
    return found


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory where there is one: commits are quick there, so that more of them are hit."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield folder
    shutil.rmtree(folder)


def test_a_kill_on_disk(tmp_path: Path) -> None:
    found = kill_rounds(tmp_path, 12, seed=11, generations=2, paths=1, longest_s=0.4, pin=False)
    assert found["advanced"] >= 1


def test_a_kill_with_stripes_and_pins(in_memory: Path) -> None:
    found = kill_rounds(in_memory, 30, seed=12, generations=2, paths=2, longest_s=0.12, pin=True)
    assert found["advanced"] >= 1


def test_a_kill_of_an_in_place_update_is_noticed(in_memory: Path) -> None:
    found = kill_rounds(in_memory, 8, seed=13, generations=1, paths=1, longest_s=0.2, pin=False)
    assert found["torn"] + found["advanced"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("rounds", "generations", "paths", "pin"),
    [(400, 2, 1, False), (200, 2, 2, True), (200, 3, 1, True), (100, 3, 2, False), (100, 1, 1, False)],
)
def test_a_thousand_kills(tmp_path: Path, rounds: int, generations: int, paths: int, pin: bool) -> None:
    found = kill_rounds(
        tmp_path, rounds, seed=rounds + generations, generations=generations, paths=paths, longest_s=0.4, pin=pin
    )
    assert found["advanced"] >= rounds // 10 or generations == 1
    assert found["torn"] == 0 or generations == 1
    print(json.dumps(found))

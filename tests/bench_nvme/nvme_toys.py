"""What the tests of `lamina nvme` share: toy runs in this process and in others, and made-up measurements."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.nvme import command, measure, session
from lamina.bench.nvme.points import Measured, Phase, Point, Trial, Workload

RING_BAN = Path(__file__).parents[1] / "aio_native" / "ring_ban.py"
TOY = [
    "--seconds", "0.2", "--size", "8MiB", "--block-sizes", "64K,256K", "--queue-depths", "1,4", "--files", "1,2",
    "--extras", "none",
]  # fmt: skip
NOBODY = 65534

DROP = """
import ctypes, os, resource, sys
import lamina.bench.__main__ as command, lamina.bench.nvme.command
{before}
os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self stays root's
sys.exit(command.main(sys.argv[1:]))
"""


class Ticking:
    """Stands for the module ``time``: so many seconds pass at each look, and none between."""

    def __init__(self, step_s: float = 1e-3) -> None:
        self.now = 0.0
        self._step_s = step_s

    def perf_counter(self) -> float:
        self.now += self._step_s
        return self.now


def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """The clock of all that a run in this process measures by, however fast this machine is and whatever else it does."""
    clock = Ticking()
    for module in (command, session, measure):
        monkeypatch.setattr(module, "time", clock)
    return clock


def lamina(*arguments: str, launcher: Sequence[str] = (), timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, *launcher, "-m", "lamina.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def lamina_as_nobody(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The same after giving root up; the interpreter may lie where nobody else can read, so imports come first."""
    program = DROP.format(before=before, user=NOBODY)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON line of a run that went well."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    loaded: dict[str, Any] = json.loads(lines[0])
    return loaded


def wait_until(happens: Callable[[], object], seconds: float = 90.0) -> None:
    """Poll; AssertionError when it does not happen in time."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def leftovers(folder: Path) -> list[str]:
    """Names that a run would have to clean up."""
    return sorted(os.listdir(folder))


def point(backend: str = "uring", block: int = 1 << 20, depth: int = 4, files: int = 1) -> Point:
    return Point(backend=backend, block_bytes=block, queue_depth=depth, files=files)


def measured(
    rate: float,
    *,
    at: Point | None = None,
    workload: Workload = Workload.READ,
    cost_s: float = 0.1,
    seconds: float = 0.08,
    phase: Phase = Phase.COARSE,
) -> Measured:
    """A made-up outcome."""
    shares = {Workload.READ: (1.0, 0.0), Workload.WRITE: (0.0, 1.0), Workload.MIX: (0.5, 0.5)}[workload]
    trial = Trial(workload=workload, point=at or point(), seconds=seconds, phase=phase)
    return Measured(
        trial=trial, read=shares[0] * rate, write=shares[1] * rate, latency_s=1e-3, cost_s=cost_s, depth=4.0
    )

"""Memory does not grow over steps with evaluation and saves mixed in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KIB = 1 << 10
SCRIPT = Path(__file__).with_name("memory_over_steps.py")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("where", ["memory", "nvme"])
@pytest.mark.parametrize(
    ("steps", "allowed"),
    # The kernel's count is coarse over few steps: what a thread's first allocation maps is as much as 300 steps may leak.
    [(60, 2048 * KIB), pytest.param(300, 512 * KIB, marks=pytest.mark.slow)],
)
def test_steps_with_evaluation_and_saves_need_no_more_memory(
    steps: int, allowed: int, where: str, tmp_path: Path
) -> None:
    """In a process of its own: what other tests have left lies in the way of this one's allocations."""
    command = [sys.executable, str(SCRIPT), str(steps), where, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])
    # From the first third on: the first steps fill pools and caches.
    first = len(samples["resident"]) // 3
    late, objects, host = (samples[name][first:] for name in ("resident", "objects", "host"))
    middle = len(late) // 2
    growth = sum(late[middle:]) / len(late[middle:]) - sum(late[:middle]) / middle
    assert growth < allowed, samples
    assert objects[-1] - objects[0] < 200, samples
    assert len(set(host)) == 1, samples

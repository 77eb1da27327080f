"""Peak memory: the plan and 2 percent are enough, and less than the plan is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("peak_memory.py")


def train(folder: Path, factor: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(factor)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_the_plan_and_two_percent_are_enough(tmp_path: Path) -> None:
    done = train(tmp_path, 1.02)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["resident"] <= found["plan"] * 1.02
    assert found["mapped"] <= found["plan"] * 1.02


def test_less_than_the_plan_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, 0.8)
    assert done.returncode != 0
    assert (
        "BudgetError: host arena: cannot reserve 268,435,456 bytes: Cannot allocate memory. By RLIMIT_AS" in done.stderr
    )


@pytest.mark.root
@pytest.mark.slow
def test_under_a_cgroup(tmp_path: Path) -> None:
    """The same in a memory cgroup (v1) that would kill it for more; page cache does not count, direct I/O makes none."""
    top = Path("/sys/fs/cgroup/memory")
    group = top / f"lamina-test-{os.getpid()}"
    if not os.access(top / "cgroup.procs", os.W_OK):
        pytest.skip("needs a writable cgroup v1 memory hierarchy")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int((256 + 16) * 1.02 * (1 << 20)) + (80 << 20)))
        shell = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} {SCRIPT} {tmp_path} 1.02"
        done = subprocess.run(
            ["sh", "-c", shell],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        assert int((group / "memory.max_usage_in_bytes").read_text()) > 0
    finally:
        group.rmdir()

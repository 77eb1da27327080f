"""Ranks that take different branches are told, by name and within a timeout; they never hang or gather garbage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("diverging_rank_script.py")


def errors(case: str) -> list[str]:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(SCRIPT), case),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2, run.stderr[-3000:]
    return [entry["error"] for entry in sorted(found, key=lambda entry: entry["rank"])]


@pytest.mark.distributed
def test_another_branch_is_named_on_every_rank() -> None:
    for error in errors("branch"):
        assert "what is gathered differs between ranks: rank 0: layers.2, rank 1: layers.3" in error


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_stops_is_told_within_the_timeout() -> None:
    error = errors("fewer")[0]
    assert "rank 0 of 2: gathering layers.1 failed after" in error
    assert "must use the same modules" in error

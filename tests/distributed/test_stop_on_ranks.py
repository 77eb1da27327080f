"""A stop signal that reaches one rank stops all of them after the same micro-batch, with a checkpoint to go on from."""

import json
from pathlib import Path

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("stop_rank_script.py")


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_all_ranks_stop_together(tmp_path: Path) -> None:
    run = run_ranks(SCRIPT, 2, tmp_path, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == {"code": 143, "micro_steps": 3, "right": True}

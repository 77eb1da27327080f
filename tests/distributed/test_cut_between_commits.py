"""Ranks that are killed when only some of them have committed a step go on from the last one that all have."""

import json
from pathlib import Path

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("cut_rank_script.py")


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_killed_between_their_commits_all_go_on_from_the_step_before(tmp_path: Path) -> None:
    assert run_ranks(SCRIPT, 2, tmp_path, "cut", timeout=50).returncode != 0
    steps = [_newest_step(tmp_path / "cut", rank) for rank in range(2)]
    assert steps == [3, 2]
    run = run_ranks(SCRIPT, 2, tmp_path, "resume", timeout=50)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == {"first": 2, "right": True, "then": 5}


def _newest_step(folder: Path, rank: int) -> int:
    (manifest,) = folder.rglob(f"rank{rank}/manifest.json")
    return int(json.loads(manifest.read_text())["committed"][0]["step"])

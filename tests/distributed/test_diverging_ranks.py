"""Ranks that take different branches are told, by name and within a timeout; they never hang or gather garbage."""

from pathlib import Path

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("diverging_rank_script.py")


def errors(case: str, folder: Path) -> list[str]:
    run = run_ranks(SCRIPT, 2, case, folder, timeout=100)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"], run.stderr[-3000:]
    return [(folder / rank).read_text() for rank in ("0", "1")]


@pytest.mark.distributed
def test_another_branch_is_named_on_every_rank(tmp_path: Path) -> None:
    for error in errors("branch", tmp_path):
        assert "what is gathered differs between ranks: rank 0: layers.2, rank 1: layers.3" in error


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_stops_is_told_within_the_timeout(tmp_path: Path) -> None:
    error = errors("fewer", tmp_path)[0]
    assert "rank 0 of 2: gathering layers.1 failed after" in error
    assert "must use the same modules" in error

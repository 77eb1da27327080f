"""Stripes are a rank's own: the one whose disk became slow changes its stripes, the other does not, the numbers stay."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("stripes_rank_script.py")


def train(folder: Path, factor: float) -> list[dict[str, Any]]:
    folder.mkdir()
    done = run_ranks(SCRIPT, 2, folder, factor, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(220)
def test_each_rank_cuts_its_stripes_for_itself(tmp_path: Path) -> None:
    untouched, throttled = train(tmp_path / "untouched", 1), train(tmp_path / "throttled", 4)
    assert [rank["losses"] for rank in throttled] == [rank["losses"] for rank in untouched]
    assert [rank["shares"] for rank in untouched] == [[0.5, 0.5]] * 2
    assert throttled[0]["shares"] == [0.5, 0.5]
    assert throttled[1]["shares"] == pytest.approx([0.2, 0.8], abs=0.01)

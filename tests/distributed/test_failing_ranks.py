"""An error on one rank, wherever it comes from, ends all ranks soon, each with the cause named; nobody waits for a timeout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("failing_ranks.py")
PLACES = ("forward", "backward", "update", "loader")
SOON_S = 60.0  # of the 333 s that the ranks' timeout is


def run(cases: list[str], folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *cases],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "results").read_text())
    assert [case for case, result in found.items() if None in result["codes"]] == [], done.stderr[-3000:]
    return found


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    cases = [f"{place}, {how}" for place in PLACES for how in ("stage 3", "stage 1")] + ["backward, left open"]
    for case, result in run(cases, tmp_path).items():
        (first, second), (code, second_code) = result["ended"], result["codes"]
        assert code, case
        assert second_code, case
        assert second["error"] == "ValueError: rank 1 cannot go on", case
        assert first["error"].startswith("DivergenceError: rank 0 of 2: "), (case, first)
        assert "rank 1 has closed its engine after ValueError: rank 1 cannot go on" in first["error"], (case, first)
        assert max(first["seconds"], second["seconds"]) < SOON_S, (case, result)


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_ranks_that_wait_for_each_other_are_told_what_for(tmp_path: Path) -> None:
    found = run(
        ["skip, stage 3", "one drops, stage 1", "one drops, stage 3", "all drop, stage 1", "all drop, stage 3"],
        tmp_path,
    )
    for rank, ended in enumerate(found["skip, stage 3"]["ended"]):
        assert f"DivergenceError: rank {rank} of 2: " in ended["error"]
        assert "rank 0 for blocks.2; rank 1 for the gradients of" in ended["error"], ended
    for case in ("one drops, stage 1", "one drops, stage 3"):
        for ended in found[case]["ended"]:
            assert "rank 0 for the gradients of blocks.1; rank 1 for dropping a window" in ended["error"], (case, ended)
    for case in ("all drop, stage 1", "all drop, stage 3"):
        assert found[case]["codes"] == [0, 0]
    assert max(ended["seconds"] for result in found.values() for ended in result["ended"]) < SOON_S

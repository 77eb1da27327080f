"""Updates that start under the backward pass on several ranks give the same bits as those behind a barrier."""

import json
from pathlib import Path

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("early_rank_script.py")


FEW = (
    "unused, stage 2",
    "errors, memory",
    "two losses, nvme",
    "checkpointed, stage 2",
    "recomputed, stage 2",
    "second loss, nvme",
)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "names", "number"),
    [
        (2, "/".join(FEW), len(FEW)),
        pytest.param(2, "all", 29, marks=pytest.mark.slow),
        pytest.param(3, "all", 29, marks=pytest.mark.slow),
    ],
)
def test_early_updates_change_no_bit(world_size: int, names: str, number: int, tmp_path: Path) -> None:
    run = run_ranks(SCRIPT, world_size, tmp_path, names, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(world_size):
        results = json.loads((tmp_path / f"result{rank}").read_text())
        assert len(results) == number
        assert [name for name, result in results.items() if not result["same"]] == []
        assert [name for name, result in results.items() if result["without"]] == []
        # While the third bucket is filled the first one's sum is waited for: its update starts under the backward pass.
        assert results["two losses, nvme"]["early"] > 0
        # A block that may be run again wants its old parameters, and clipping all gradients first.
        never = ("checkpointed, ", "clipped")
        assert [name for name, result in results.items() if name.startswith(never) and result["early"]] == []

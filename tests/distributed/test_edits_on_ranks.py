"""What one rank edits in GatheredParameters counts on all of them."""

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from torch import nn

SCRIPT = Path(__file__).with_name("edit_rank_script.py")


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_all_ranks_have_the_edits_of_the_modifier(tmp_path: Path) -> None:
    run = run_ranks(SCRIPT, 2, tmp_path, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    torch.manual_seed(0)
    first, second = (nn.Linear(5, 7, bias=False).weight.detach(), nn.Linear(7, 3, bias=False).weight.detach())
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert len(found) == 6
        for (_, _, modifier), (a, b) in found.items():
            assert torch.equal(a, first * 2)
            assert torch.equal(b, second + (modifier + 1))

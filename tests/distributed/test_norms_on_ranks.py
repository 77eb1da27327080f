"""With clipping, the norm of the gradients and the weights have the same bits in every placement."""

import json
from pathlib import Path

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("norm_rank_script.py")


@pytest.mark.distributed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_norm_and_weights_do_not_depend_on_placement(world_size: int, tmp_path: Path) -> None:
    run = run_ranks(SCRIPT, world_size, tmp_path, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads((tmp_path / f"result{rank}").read_text()) for rank in range(world_size)]
    for dtype in ("fp32", "bf16"):
        alike = [{name: result for name, result in of.items() if name.startswith(dtype)} for of in found]
        outcomes = {(*result["norms"], result["weights"]) for of in alike for result in of.values()}
        assert len(outcomes) == 1, [(name, result["norms"]) for name, result in alike[0].items()]
        assert all(float.fromhex(norm) > 0.1 for norm in next(iter(outcomes))[:-1]), "all steps were clipped"
        assert len(alike[0]) == 12
        assert len({result["groups"] for result in alike[0].values()}) > 1, "other groups are shared out otherwise"

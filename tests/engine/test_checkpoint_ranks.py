"""Checkpoints of several ranks: any stage and tier into any other, and into another number of ranks (D-02, D-03, D-06)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import ODD, fresh, placements, state
from safetensors.torch import load_file
from small_model import batch

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_checkpoints_move_between_placements_and_numbers_of_ranks(tmp_path: Path) -> None:
    with fresh({}) as engine:
        for index in range(4):
            engine.backward(engine(*batch(index, ODD["vocab"])))
            engine.step()
        engine.save_checkpoint(tmp_path / "from one")
        of_one = state(engine)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    run = subprocess.run([*command, str(tmp_path)], check=False, capture_output=True, text=True, timeout=280, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.strip().splitlines()[-1])
    assert len(results["resumes"]) == 16
    assert [name for name, is_same in results["resumes"].items() if not is_same] == []
    for name, found in results["from one"].items():
        for key, values in found.items():
            assert values == of_one[key].flatten().tolist(), f"1 -> 2 ranks, {name}: {key}"
    of_two = load_file(tmp_path / "state of two.safetensors")
    for name, changes in placements(tmp_path / "n").items():
        with fresh(changes) as engine:
            engine.load_checkpoint(tmp_path / "from two")
            assert engine.global_steps == 2
            for key, values in state(engine).items():
                assert torch.equal(values, of_two[key]), f"2 -> 1 ranks, {name}: {key}"
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(weights[name], of_two[f"{name} master"]) for name in weights)
    assert len(results["background"]) == 4
    assert all(results["background"].values()), results["background"]
    assert results["fails"]["told"] == (
        f"{tmp_path}/background/bad could not be saved: rank 1: OSError: [Errno 28] No space left on device"
    )
    assert (results["fails"]["latest"], results["fails"]["bad"]) == ("good", "False")
    assert "ranks pass different tags" in results["rules"]["unlike tags"]
    assert "every rank must call it" in results["rules"]["alone"]

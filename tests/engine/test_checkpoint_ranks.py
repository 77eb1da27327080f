"""Checkpoints of several ranks: any stage and tier into any other, and into another number of ranks (D-02, D-03, D-06)."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from checkpoint_ranks import ODD, client_state, fresh, placements, state, with_client
from launch import run_ranks
from safetensors.torch import load_file
from small_model import batch

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


def check_clients(found: dict[str, Any], of_one: dict[str, list[Any]], of_two: Path) -> None:
    """State of torch's optimizers: 1 -> 2 ranks, 2 -> 1, and a refusal where a second rank would need half a matrix."""
    with with_client("NAdam") as engine:
        engine.load_checkpoint(of_two)
        again = client_state(engine)
    for whole, parts in ((of_one, found["loaded"]), (again, found["saved"])):
        assert {key for part in parts for key in part} == set(whole)
        for part in parts:
            for key, (first, last, values) in part.items():
                wanted = whole[key][2]
                assert values == (wanted if len(wanted) == 1 else wanted[first:last]), key
    assert all("resumes at the world size and stage it was saved at" in told for told in found["refused"])


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_checkpoints_move_between_placements_and_numbers_of_ranks(tmp_path: Path) -> None:
    with fresh({}) as engine:
        for index in range(4):
            engine.backward(engine(*batch(index, ODD["vocab"])))
            engine.step()
        engine.save_checkpoint(tmp_path / "from one")
        of_one = state(engine)
    of_clients = {}
    for folder, kind in (("client one", "NAdam"), ("factored one", "Adafactor")):
        with with_client(kind) as engine:
            for index in range(2):
                engine.backward(engine(*batch(index, ODD["vocab"])))
                engine.step()
            engine.save_checkpoint(tmp_path / folder)
            of_clients[folder] = client_state(engine)
    run = run_ranks(SCRIPT, 2, tmp_path, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.strip().splitlines()[-1])
    assert len(results["resumes"]) == 19
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
    check_clients(results["clients"], of_clients["client one"], tmp_path / "client two")
    assert len(results["background"]) == 5
    assert all(results["background"].values()), results["background"]
    assert results["fails"]["told"] == (
        f"{tmp_path}/background/bad could not be saved: rank 1: OSError: [Errno 28] No space left on device"
    )
    assert (results["fails"]["latest"], results["fails"]["bad"]) == ("good", "False")
    assert "ranks pass different tags" in results["rules"]["unlike tags"]
    assert "every rank must call it" in results["rules"]["alone"]

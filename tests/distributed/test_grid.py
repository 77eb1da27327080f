"""Promise P1 over stages, tiers, optimizers, formats, accumulation and clipping, on 1, 2 and 4 ranks.

Every case has the bits of the one that keeps everything in memory on every rank, and those of mixed-precision training written
in plain PyTorch, which sums the ranks in order.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grid_cases import CHOICES, all_cases, covering_cases, pairs
from launch import run_ranks

SCRIPT = Path(__file__).with_name("grid_rank_script.py")


def run(world_size: int, which: str, folder: Path, *, timeout: float) -> list[dict[str, Any]]:
    result, state = folder / "result.json", folder / "state"
    state.mkdir()
    ran = run_ranks(SCRIPT, world_size, which, state, result, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert list(state.iterdir()) == [], "nothing is left on NVMe"
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def check(results: list[dict[str, Any]]) -> None:
    assert [r["case"] for r in results if not r["same_bits"]] == []
    assert [(r["case"], r["error"]) for r in results if not r["equals_plain"]] == []


@pytest.mark.distributed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pair_of_choices_gives_the_numbers_of_plain_torch(world_size: int, tmp_path: Path) -> None:
    results = run(world_size, "pairs", tmp_path, timeout=180)
    assert len(results) == len(covering_cases())
    check(results)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_case_gives_the_numbers_of_plain_torch(world_size: int, tmp_path: Path) -> None:
    results = run(world_size, "all", tmp_path, timeout=1400)
    assert len(results) == len(all_cases()) == 312
    check(results)


def test_the_few_cases_have_every_pair_of_choices() -> None:
    covered = {pair for case in covering_cases() for pair in pairs(case)}
    assert covered == {pair for case in all_cases() for pair in pairs(case)}
    assert len(covering_cases()) < 20
    assert {choice for case in all_cases() for choice in vars(case).items()} == {
        (name, value) for name, values in CHOICES.items() for value in values
    }
    assert replace(all_cases()[-1], stage=0, home="device") == all_cases()[-1].numbers

"""State moves on several ranks as on one: the same bits as without, all ranks or none, nothing lost when they are killed."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

SCRIPT = Path(__file__).with_name("move_rank_script.py")
PLACES = ("stage 2", "stage 3", "stage 3, host", "stage 3, nvme, clipped")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


def run(folder: Path, parts: str, world_size: int, *, returncode: int | None = 0) -> list[dict[str, Any]]:
    """What each rank found."""
    done = run_ranks(SCRIPT, world_size, folder, parts, timeout=180)
    assert returncode is None or done.returncode == returncode, done.stderr[-3000:]
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), "stage 2/held/steered", 2)


def test_state_comes_crosses_and_goes_bit_for_bit(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert [what for what, right in of_rank["stage 2"].items() if not right] == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_at_every_stage_and_place(world_size: int, tmp_path: Path) -> None:
    for of_rank in run(tmp_path, "/".join(PLACES), world_size):
        assert list(of_rank) == list(PLACES)
        assert [(place, what) for place, result in of_rank.items() for what, right in result.items() if not right] == []


def test_a_rank_that_cannot_move_holds_all(found: list[dict[str, Any]]) -> None:
    for held in (of_rank["held"] for of_rank in found):
        assert held["free"] is None
        assert held["full"] == "no hole of the host tier would be large enough (rank 1)"
        assert held["different"].startswith("the ranks would take different ones")
        assert held["disk full"] == [True, False]
        assert held["left although memory is full"]
        assert held["losses"]
        assert held["state"]


def test_the_slowest_rank_decides_for_all(found: list[dict[str, Any]]) -> None:
    first, second = (of_rank["steered"] for of_rank in found)
    assert first == second
    assert first["factor"] == pytest.approx(3.0)
    assert first["moved"]
    assert first["told"][-1:] == ["the state was moved"]
    assert first["losses"]


@pytest.mark.slow
def test_the_others_end_when_one_fails_in_a_move(tmp_path: Path) -> None:
    first, second = run(tmp_path, "failing", 2)
    assert (second["error"], second["step"]) == ("OSError", 3)
    assert first["error"] == "DivergenceError"
    assert "completing a move of state together failed" in first["text"]


@pytest.mark.slow
def test_killed_in_a_move_they_go_on_from_the_last_commit(tmp_path: Path) -> None:
    before = run(tmp_path, "killed", 2, returncode=None)
    after = [of_rank["resumed"] for of_rank in run(tmp_path, "resumed", 2)]
    for killed, resumed in zip(before, after, strict=True):
        assert "where a later process would not find it (tiers.keep_state)" in killed["sentence"]
        assert resumed["first"] == 4
        assert resumed["losses"] == killed["losses"][4:]

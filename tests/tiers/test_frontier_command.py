"""The frontier: what counts as holding, and one toy run of the whole command."""

import json
from pathlib import Path

import pytest

from lamina.bench.frontier.command import Runs, _sound, main, parse, points_of, verdicts
from lamina.bench.frontier.modes import Mode, peer_modes
from lamina.bench.frontier.plot import draw
from lamina.bench.frontier.run import LOOKS


def runs(system: str, name: str, step_s: float, peak: float, losses: tuple[float, ...] = (5.0, 4.0)) -> Runs:
    result = {"step_s": step_s, "peak_bytes": peak, "forward_s": step_s / 3, "backward_s": step_s / 3}
    return Runs(mode=Mode(system=system, name=name), results=[result | {"losses": list(losses)}])


def test_speed_counts_only_within_the_share_of_memory() -> None:
    table = [
        runs("deepspeed", "nvme", 2.0, 4.0),
        runs("deepspeed", "streaming", 3.0, 2.0),
        runs("lamina", "small", 1.1, 0.9),
        runs("lamina", "middle", 0.9, 1.5),
        runs("lamina", "large", 0.5, 3.9),
    ]
    found = {verdict["wanted"]: verdict for verdict in verdicts(table)}
    quarter = found["0.25 x the memory of deepspeed nvme: 2 x its speed"]
    assert (quarter["by"], quarter["holds"]) == ("small", False)
    assert quarter["speed"] == pytest.approx(2.0 / 1.1)
    assert found["1 x the memory of deepspeed nvme: 3 x its speed"]["by"] == "large"
    assert found["1 x the memory of deepspeed nvme: 3 x its speed"]["holds"]
    assert found["0.5 x the memory of deepspeed streaming: 2.5 x its speed"]["holds"]
    assert found["1 x the memory of deepspeed streaming: 3 x its speed"]["by"] == "middle"


def test_nothing_that_fits_is_no_speed_at_all() -> None:
    found = verdicts([runs("deepspeed", "nvme", 2.0, 4.0), runs("lamina", "large", 0.1, 5.0)])
    assert [verdict["speed"] for verdict in found] == [0.0, 0.0]


def test_the_slowest_start_of_lamina_counts_where_the_model_is_small() -> None:
    table = [runs("torch", "in memory", 1.0, 1.0), runs("lamina", "a", 1.0, 1.0), runs("lamina", "b", 1.0, 1.0)]
    for item, seconds in zip(table, (2.0, 2.5, 3.6), strict=True):
        item.results[0]["first_step_at_s"] = seconds
    (verdict,) = verdicts(table, small=True)
    assert (verdict["by"], verdict["holds"]) == ("b", False)
    assert verdict["ratio"] == pytest.approx(1.6)
    assert verdicts(table) == []


def test_losses_are_compared_step_by_step() -> None:
    plain = runs("torch", "in memory", 1.0, 1.0)
    assert runs("lamina", "x", 1.0, 1.0, (5.01, 3.96)).loss_gap(plain) == pytest.approx(0.04)
    assert runs("lamina", "x", 1.0, 1.0).loss_gap(None) is None


def test_the_peer_s_settings_differ_where_they_are_meant_to() -> None:
    modes = {mode.name: mode.config for mode in peer_modes(2, "/data")}
    assert list(modes) == ["none", "cpu", "nvme", "streaming"]
    assert all(config["gradient_clipping"] == 0 and config["bf16"]["enabled"] for config in modes.values())
    assert "offload_param" not in modes["none"]["zero_optimization"]
    assert modes["nvme"]["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/data"
    assert modes["streaming"]["zero_optimization"]["stage3_max_live_parameters"] == 0


def test_the_picture_shows_every_run_with_a_result_and_what_is_wanted_beside_the_peer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = [
        runs("torch", "in memory", 1.0, 1.0),
        runs("lamina", "in memory", 1.1, 0.9),
        runs("lamina", "1+8 B/param", 1.5, 0.5),
        runs("deepspeed", "nvme", 4.0, 2.0),
        Runs(mode=Mode(system="lamina", name="0.1+1 B/param"), error="PlacementError"),
    ]
    points = points_of(table)
    assert [point.label for point in points] == ["in memory", "in memory", "1+8", "nvme"]
    draw(str(tmp_path / "frontier.png"), {"toy": points, "none": []})
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("budgets", ["1", "1+x", "1+0", "-1+2"])
def test_budgets_that_make_no_sense_are_refused(budgets: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([f"--budgets={budgets}"])
    assert "budgets" in capsys.readouterr().err


def test_a_refused_budget_is_no_failure_but_an_error_is() -> None:
    plain = runs("torch", "in memory", 1.0, 1.0)
    refused = Runs(
        mode=Mode(system="lamina", name="1+1"), error="lamina.tiers.placement.placement.PlacementError: too small"
    )
    failed = Runs(mode=Mode(system="lamina", name="1+8"), error="OSError: the disk is gone")
    strange = runs("lamina", "x", 1.0, 1.0, (5.0, 4.5))
    assert [_sound(item, plain) for item in (plain, refused, failed, strange)] == [True, True, False, False]


def test_a_toy_frontier_has_equal_losses_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--sizes", "toy", "--rounds", "1", "--steps", "2", "--warm-up", "2", "--nvme-path", str(tmp_path)]
    assert main([*arguments, "--budgets", "1+8", "--only", "torch|B/param", "--json"]) == 0
    plain, streamed = json.loads(capsys.readouterr().out)["sizes"]["toy"]["runs"]
    assert plain["loss_gap"] == 0
    assert streamed["loss_gap"] < 0.03
    (result,) = streamed["results"]
    assert result["tiers"]["nvme"] > 0
    assert 0 < result["lower_bound_s"] <= result["step_s"] * 2, "medians of the same two steps"
    assert len(result["disk_s_per_byte"]) == 2 * LOOKS, "before and after them"
    assert 0.3 < plain["results"][0]["first_step_at_s"] < 100
    assert list(tmp_path.iterdir()) == []

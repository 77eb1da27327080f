"""`lamina plan` as users run it: output, files, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.__main__ import main as lamina
from lamina.engine.config import EngineConfig
from lamina.engine.planner import machine_preset, model_preset


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = lamina(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    (line,) = out.splitlines()
    return code, json.loads(line)


def test_table_recommends_and_advises(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "llama-7b", "--machine", "rtx4090", "--sequence", "2048")
    assert (code, err) == (0, "")
    assert "Recommended: ZeRO-1 optimizer host: the fastest of" in out
    assert "moments 53.9" in out  # in the way of the placement without offload
    assert "Next: micro-batch 2" in out
    assert "Largest model of this kind" in out
    assert "Not counted:" in out


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "gpt2", "--machine", "rtx4090", "--stage", "3", "--micro-batch", "2")
    assert code == 0
    assert data["model"]["params"] == model_preset("gpt2").total_params
    assert {option["stage"] for option in data["options"]} == {3}
    for option in data["options"]:
        for tier, phases in option["bytes_per_rank"].items():
            peak = max(sum(kinds.values()) for kinds in phases.values())
            assert option["tiers"][tier]["need"] == peak  # one rank on the host
        tokens = 2 * 1024
        assert option["tokens_per_s"] == pytest.approx(tokens / option["step_s"])
        assert option["lower_bound_s"] <= option["step_s"]
    assert data["recommended"] in {option["label"] for option in data["options"] if option["fits"]}


def test_nothing_fits_is_exit_code_one_with_causes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gpt3-175b", "--machine", "rtx4090")
    assert code == 1
    assert "Recommended: nothing fits. Nearest is" in out
    code, data = run_json(capsys, "gpt3-175b", "--machine", "rtx4090")
    assert code == 1
    assert data["recommended"] is None
    assert all(option["causes"] for option in data["options"] if option["stage"] == 0)


def test_what_a_machine_keeps_back_is_told_where_it_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gpt2", "--machine", "rtx4090", "--set", "host=3GB")
    assert code == 1
    assert "3 GB host memory (4.29 GB of it left to all else)" in out
    assert re.search(r"of 0 B \(\w+; host_reserve_bytes leaves 4\.29 GB to all else\)", out)


def test_what_if_compares(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-13b", "--machine", "rtx4090", "--what-if", "host=256GB,nvme=2")
    code, data = run_json(capsys, *arguments)
    assert code == 0
    (variant,) = data["what_if"].values()
    assert data["recommended"].endswith("optimizer nvme")
    assert variant["recommended"].endswith("optimizer host")
    code, out, _ = run(capsys, *arguments)
    assert "as asked" in out
    assert "host=256GB,nvme=2" in out


@pytest.mark.parametrize(
    ("convention", "figure"),
    [("zero-paper", "108 GB"), ("deepspeed", "182 GB"), ("infinity", "6.44B")],
)
def test_conventions_are_shown_beside_ours(capsys: pytest.CaptureFixture[str], convention: str, figure: str) -> None:
    # 16 bytes a parameter; 18 x 1.5 bytes a parameter; 12 x 32 x 4096^2 parameters.
    _, out, _ = run(capsys, "llama-7b", "--machine", "rtx4090", "--convention", convention)
    assert figure in out.partition("Beside the convention")[2]


def test_explain_sums_to_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    label = "ZeRO-3 param nvme, optimizer nvme"
    _, out, _ = run(capsys, "llama-7b", "--machine", "rtx4090", "--explain", "--option", label)
    text = out.partition(f"{label} in full")[2]
    for heading in ("device, one rank", "host, one rank", "nvme, one rank", "How each figure", "Busy time"):
        assert heading in text
    assert "MFU" in text
    assert "model operations = 6 * active parameters" in text


def test_emitted_config_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    arguments = ("llama-7b", "--machine", "rtx4090", "--emit-config", str(file), "--nvme-path", str(tmp_path / "n"))
    code, _, _ = run(capsys, *arguments, "--option", "ZeRO-3 param nvme, optimizer nvme", "--accumulation", "4")
    assert code == 0
    config = EngineConfig.load(str(file), world_size=1)
    assert config.gradient_accumulation_steps == 4
    assert config.zero_optimization.offload_param.device == "nvme"
    assert [str(entry.path) for entry in config.nvme_paths] == [str(tmp_path / "n")]


def test_no_config_is_written_for_what_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    code, _, err = run(capsys, "gpt3-175b", "--machine", "rtx4090", "--emit-config", str(file))
    assert code == 2
    assert "no config is written, nothing fits" in err
    assert not file.exists()


def test_plot_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    code, _, _ = run(capsys, "gpt2", "--machine", "cpu-16", "--plot", str(file))
    assert code == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert file.stat().st_size > 20_000


def test_machine_file_and_rates_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    machine = {
        "name": "box",
        "shared_memory": True,
        "host_bytes": "8GiB",
        "half_flops": 1e12,
        "host_bandwidth": "40GB/s",
    }
    file.write_text(json.dumps(machine))
    code, data = run_json(capsys, "gpt2", "--machine", str(file))
    assert code == 0
    assert data["machine"]["name"] == "box"
    code, _, err = run(capsys, "gpt2", "--machine", str(file), "--set", "nvme_bytes=1TB")
    assert code == 2
    assert "nvme_read_bandwidth is missing" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "--machine", "h900"), "presets: this"),
        (("gpt2", "--machine", "h100", "--micro-batch", "0"), "micro_batch: 0"),
        (("gpt2", "--machine", "h100", "--sub-group", "0"), "sub_group is 0"),
        (("gpt2", "--machine", "h100", "--option", "ZeRO-1", "--emit-config", "never.json"), "does not run it"),
        (("gpt2", "--machine", "this", "--ranks", "0"), "--ranks: 0"),
        (("gpt2", "--machine", "h100", "--set", "host"), "KEY=VALUE"),
        (("gpt2", "--machine", "h100", "--what-if", "ram=1GB"), "'ram' is unknown"),
        (("gpt2", "--machine", "h100", "--option", "ZeRO-9"), "there are: "),
        (("gpt2", "--machine", "h100", "--tensor", "3"), "no multiple of tensor 3"),
        (("missing/config.json",), "no preset and no file"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_long_sequences_for_learned_positions_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "gpt2", "--machine", "h100", "--sequence", "4096")
    assert "sequence 4096 exceeds the 1024 learned positions" in out


def test_planner_needs_no_torch() -> None:
    program = (
        "import sys; from lamina.bench.__main__ import main; "
        "code = main(['plan', 'gpt2', '--machine', 'rtx4090', '--json']); "
        "sys.exit(code if 'torch' not in sys.modules else 'torch was imported')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_preset_names_are_offered_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "llama-70b" in out
    assert machine_preset("h200").name in out


def test_the_timeline_draws_the_simulated_step_and_keeps_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    small = ["layers=4,hidden=256,heads=4", "--machine", "rtx4090", "--no-barrier"]
    placement = ["--option", "ZeRO-3 param nvme, optimizer nvme"]
    code, out, _ = run(capsys, *small, *placement, "--timeline", str(tmp_path / "t.png"))
    assert code == 0
    assert f"written to {tmp_path / 't.png'}" in out
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert lanes >= {
        "nvme->host: parameters",
        "nvme->host: optimizer",
        "host->nvme: optimizer",
        "compute",
        "Adam",
    }

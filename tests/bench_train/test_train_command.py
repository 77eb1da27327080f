"""`lamina train` from end to end at toy size: numbers, report, errors, signals, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.__main__ import main
from lamina.bench.report import ProgressLine

TOY = ("--layers", "3", "--dim", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--sample", "8")


@pytest.fixture(autouse=True)
def _folder_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder beside a short text with structure to learn."""
    (tmp_path / "text.txt").write_text("".join(f"line {n}: {n * n} is the square of {n}\n" for n in range(900)))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def train(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run in this process; returns the JSON (empty when there is none) and stderr."""
    assert main(["train", *TOY, "--text", "../text.txt", "--json", *options]) == code
    printed = capsys.readouterr()
    return (json.loads(printed.out) if printed.out else {}), printed.err


def left_behind() -> list[str]:
    return sorted(os.listdir("."))


@pytest.mark.parametrize("head", ["--untied", "--tied"])
@pytest.mark.parametrize("accum", ["1", "2"])
def test_fp32_is_bit_equal_in_memory_and_in_plain_pytorch(
    capsys: pytest.CaptureFixture[str], head: str, accum: str
) -> None:
    got, _ = train(capsys, "--steps", "5", "--dtype", "fp32", "--compare", head, "--accum", accum)
    assert len(got["losses"]) == 5
    in_memory, plain = got["comparisons"]
    for other in (in_memory, plain):
        assert other["losses"] == got["losses"]
        assert other["held_out"] == got["held_out"]
        assert other["difference"]["bit_equal"]
    assert got["link_bytes"]["host->nvme"] > 0
    assert in_memory["link_bytes"] == {}
    assert left_behind() == []


def test_bf16_is_bit_equal_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    got, _ = train(capsys, "--steps", "5", "--dtype", "bf16", "--compare")
    in_memory, plain = got["comparisons"]
    assert in_memory["losses"] == got["losses"]
    assert in_memory["held_out"] == got["held_out"]
    assert plain["difference"]["largest"] < 0.05


def test_held_out_loss_falls_and_the_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", "8", "--dim", "64", "--dtype", "fp32")
    budgets = ("--device-bytes", "900kB", "--host-bytes", "2.7MB")
    got, err = train(capsys, "--steps", "40", "--lr", "0.005", *shape, *budgets)
    assert got["held_out"]["before"] == pytest.approx(5.6, abs=0.2)
    assert got["held_out"]["after"] < 3
    assert 0 < got["peak_bytes"]["device"] <= 900_000
    assert 0 < got["peak_bytes"]["host"] <= 2_700_000
    assert got["link_bytes"]["nvme->host"] > 40 * 1_000_000
    assert got["link_bytes"]["host->nvme"] > 40 * 1_000_000
    assert len(got["losses"]) == len(got["rates"]) == len(got["steps"]) == 40
    assert max(got["rates"]) == pytest.approx(0.005, rel=0.01)
    assert got["rates"][-1] < 0.001
    assert len(got["sample"]["text"]) > 0
    process = got["process"]
    assert process["peak_rss_bytes"] == max(process["setup_peak_rss_bytes"], process["training_peak_rss_bytes"])
    assert 0 < process["rss_before_bytes"] <= process["setup_peak_rss_bytes"]
    assert got["in_memory"]["state_bytes"] == 16 * got["model"]["parameters"]
    assert got["median_step"]["step_s"] > 0
    assert got["machine"]["cores"] >= 1
    assert "held-out loss" in err
    assert "I/O backend" in err
    assert "median step" in err
    assert "40/40" in err
    assert left_behind() == []


def test_the_same_seed_gives_the_same_text_and_another_seed_another_curve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [train(capsys, "--steps", "3", "--seed", seed)[0] for seed in ("5", "5", "6")]
    assert runs[0]["losses"] == runs[1]["losses"] != runs[2]["losses"]
    assert runs[0]["sample"] == runs[1]["sample"]


def test_a_trace_has_a_lane_for_each_kind_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    train(capsys, "--steps", "3", "--trace", "../trace.json")
    events = json.loads(Path("../trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(lanes) >= 2
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_users_folder_keeps_its_own_files_only(capsys: pytest.CaptureFixture[str]) -> None:
    Path("state").mkdir()
    Path("state/theirs.txt").write_text("keep")
    got, _ = train(capsys, "--steps", "2", "--nvme-path", "state")
    assert got["run"]["config"]["tiers"]["nvme"] == [{"path": os.path.abspath("state")}]
    assert [path.name for path in Path("state").iterdir()] == ["theirs.txt"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--text", "nowhere"), 2, "nowhere"),
        (("--text", "/dev/null"), 2, "neither a regular file nor a folder"),
        (("--config", "nowhere.json"), 2, "cannot be read"),
        (("--nvme-path", "../text.txt"), 2, "--nvme-path: Not a directory"),
        (("--nvme-path", "../text.txt/below"), 2, "--nvme-path: Not a directory"),
        (("--trace", "no/such/folder/trace.json"), 2, "--trace: No such file or directory"),
        (("--trace", ".."), 2, "--trace: Is a directory"),
        (("--device-bytes", "4kB", "--host-bytes", "400kB"), 2, "device_bytes is 4,000"),
        (("--host-bytes", "4kB"), 2, "host_bytes is 4,000"),
        (("--dim", "33"), 2, "--dim 33 is not divisible by --heads 2"),
        (("--seq", "2000"), 2, "is too small"),
        (("--dtype", "fp16", "--compare"), 2, "--compare with --dtype fp16"),
    ],
)
def test_mistakes_are_one_message_and_leave_nothing(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, message: str
) -> None:
    _, err = train(capsys, "--steps", "2", *options, code=code)
    assert message in err
    assert "Traceback" not in err
    assert left_behind() == []


def test_a_diverged_run_still_reports(capsys: pytest.CaptureFixture[str]) -> None:
    got, err = train(capsys, "--steps", "2", "--dtype", "fp32", "--lr", "1e30")
    assert "tiered: the loss is not finite" in err
    assert err.count("no sample") == 1
    assert "Traceback" not in err
    assert len(got["losses"]) == 2
    assert got["losses"][0] == pytest.approx(5.6, abs=0.3)
    assert got["losses"][1] is None
    assert got["held_out"]["before"] > 5
    assert got["held_out"]["after"] is None
    assert got["sample"] == {"prompt": "", "text": ""}
    assert got["median_step"]["step_s"] > 0
    assert left_behind() == []


def test_a_model_beyond_all_memory_is_refused_before_it_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(shape: object) -> None:
        raise AssertionError("built")

    monkeypatch.setattr("lamina.bench.training.command.GPT", build)
    _, err = train(capsys, "--dim", "100000000", code=1)
    # 3 blocks of 12 dim**2 + 4 dim, two tables of 256 rows, 32 positions, the last norm; 4 bytes each
    params = 3 * (12 * 10**16 + 4 * 10**8) + (2 * 256 + 32 + 2) * 10**8
    assert f"needs {4 * params:,} bytes" in err
    assert "there are " in err
    assert len(err.strip().splitlines()) == 1
    assert left_behind() == []


def test_a_batch_beyond_all_memory_is_refused_before_it_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: object, **__: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr("lamina.bench.training.command.Corpus.training_batch", draw)
    monkeypatch.setattr("lamina.bench.training.command.Corpus.held_out_batches", draw)
    _, err = train(capsys, "--batch", "2000000000", code=1)
    # 2,000,000,000 sequences of 32 bytes: two int64 and 256 logits in fp32 for each byte
    assert f"needs {2_000_000_000 * 32 * (16 + 1024):,} bytes" in err
    assert len(err.strip().splitlines()) == 1
    assert left_behind() == []


def test_an_unknown_config_key_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    Path("../config.json").write_text(json.dumps({"tiers": {"host_byte": 1}}))
    _, err = train(capsys, "--config", "../config.json", code=2)
    assert "tiers.host_byte" in err
    assert "host_bytes" in err
    assert left_behind() == []


def test_ctrl_c_ends_after_the_step_with_nothing_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = ProgressLine.advance

    def interrupted_advance(progress: ProgressLine, text: str) -> None:
        advance(progress, text)
        if len(progressed := [*seen, text]) == 3:
            signal.raise_signal(signal.SIGINT)
        seen[:] = progressed

    seen: list[str] = []
    monkeypatch.setattr(ProgressLine, "advance", interrupted_advance)
    before = signal.getsignal(signal.SIGINT)
    got, err = train(capsys, "--steps", "50", "--compare", code=130)
    assert "SIGINT: stopping after this step" in err
    assert got["interrupted"]
    assert len(got["losses"]) == 3
    assert got["held_out"]["after"] is None
    assert got["comparisons"] == []
    assert signal.getsignal(signal.SIGINT) is before
    assert left_behind() == []


def test_sigterm_ends_a_process_after_the_step_with_nothing_left() -> None:
    command = [sys.executable, "-m", "lamina.bench", "train", *TOY, "--text", "../text.txt", "--json"]
    with subprocess.Popen(
        [*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        before = ""
        for line in process.stderr:
            before += line
            if " 1/" in line:  # the first step's progress
                process.terminate()
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, before + err
    assert "SIGTERM: stopping after this step" in err
    assert "Traceback" not in err
    got = json.loads(out)
    assert got["interrupted"]
    assert 0 < len(got["losses"]) < 100000
    assert left_behind() == []

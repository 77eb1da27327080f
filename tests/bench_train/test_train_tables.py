"""Figures of the report: sums, medians, comparisons, and JSON that any parser reads."""

import io
import json
import math

import pytest

from lamina.bench.report import Reporter, format_bytes, format_seconds
from lamina.bench.training.args import parse
from lamina.bench.training.printed import (
    Outcome,
    compare_curves,
    in_memory_bytes,
    print_comparison,
    print_outcome,
    progress_text,
    step_split,
)
from lamina.engine.metrics import StepMetrics


def metrics(step: int, step_s: float, **more: object) -> StepMetrics:
    values: dict[str, object] = {"forward_s": 0.25, "backward_s": 0.5, "update_s": 0.125, "commit_s": 0.0}
    links = {"nvme->host": 3_000_000 * step, "host->nvme": 1_000_000}
    values |= {"link_bytes": links, "link_gbps": {"nvme->host": 1.5}, "stalled_s": {"nvme->host": 0.1}}
    values |= {"peak_bytes": {"device": 10**6 * step, "host": 10**7}, "nvme_written_bytes": 10**6 * step}
    return StepMetrics(step=step, step_s=step_s, lower_bound_s=0.5, **(values | more))  # type: ignore[arg-type]


def printed(outcome: Outcome, *options: str) -> str:
    out = io.StringIO()
    print_outcome(Reporter(out=out), parse(("--size", "tiny", *options))[1], outcome)
    return out.getvalue()


def test_the_report_has_peaks_sums_split_and_ratio() -> None:
    outcome = Outcome(
        name="tiered",
        losses=[5.5, 4.0, 3.0],
        metrics=[metrics(1, 9.0), metrics(2, 1.0), metrics(3, 2.0)],
        held_out_before=5.55,
        held_out_after=2.95,
        peak_rss=300_000_000,
        rss_before=200_000_000,
        sample=(b"def f", b"(x):\n\x1b[31mred"),
    )
    text = printed(outcome, "--device-bytes", "4MB", "--dtype", "bf16", "--batch", "4")
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "held-out loss 5.550 before, 2.950 after 3 steps in 0 us" in lines
    assert "| ·[31mred" in lines
    assert "device tier 3 MB 4 MB" in lines
    assert "host tier 10 MB none" in lines
    assert "process: peak resident in training 300 MB" in lines
    # 300 MB - 200 MB before - 13 MB in memory tiers - 17.9 MB of activations in bf16
    assert "of that neither tiers, activations nor before 69.1 MB" in lines
    # 3 x (1 + 2 + 3) MB in all; without the first step 15 MB in 2 steps of 3 s together, 0.2 s of it stalled
    assert "nvme->host 18 MB 7.5 MB 0.01 6.7%" in lines
    assert "step 1.5 s 100%" in lines  # without the first step
    assert "lower bound 500 ms, ratio 3.00; 341 tokens/s" in lines


def test_memory_without_tiers_is_16_bytes_a_parameter_and_activations() -> None:
    run = parse(("--size", "tiny", "--dtype", "fp32"))[1]
    state, activations = in_memory_bytes(run)
    assert state == 16 * run.shape.num_params
    assert activations == run.shape.activation_bytes(batch=run.batch, itemsize=4)


def test_medians_leave_out_the_first_step_where_there_are_others() -> None:
    steps = [metrics(1, 9.0), metrics(2, 1.0), metrics(3, 2.0), metrics(4, 4.0)]
    assert step_split(steps)["step_s"] == 2.0
    assert step_split(steps[:1])["step_s"] == 9.0
    assert step_split(steps)["lower_bound_ratio"] == 4.0


def test_progress_names_loss_speed_links_and_stalls() -> None:
    text = progress_text(2.5, 1000, metrics(1, 0.5))
    assert text == "loss 2.500  2,000 tokens/s  nvme->host 1.50 GB/s  stalled 20%"


def test_curves_are_bit_equal_only_when_every_loss_is() -> None:
    assert compare_curves([1.5, math.nan], [1.5, math.nan]).bit_equal
    ulp = math.nextafter(2.0, 3.0)
    found = compare_curves([1.0, 2.0, 3.0], [1.0, ulp, 3.0])
    assert not found.bit_equal
    assert (found.largest, found.step) == (ulp - 2.0, 1)
    assert found.largest_relative == pytest.approx((ulp - 2.0) / 2)
    assert compare_curves([1.0], [math.nan]).largest == math.inf
    with pytest.raises(ValueError, match="shorter"):
        compare_curves([1.0, 2.0], [1.0])


def test_the_comparison_shows_curves_side_by_side_and_says_which_differ() -> None:
    out = io.StringIO()
    ours = Outcome(name="tiered", losses=[5.0, 4.0])
    same, other = Outcome(name="in memory", losses=[5.0, 4.0]), Outcome(name="plain", losses=[5.0, 4.5])
    print_comparison(Reporter(out=out), parse(("--dtype", "fp32"))[1], ours, [same, other])
    text = out.getvalue()
    assert "5.000000 │  5.000000 │ 5.000000" in text
    assert "tiered against in memory: bit-equal over 2 steps" in text
    assert "tiered against plain: NOT bit-equal, largest difference 0.5 (0.11 relative) at step 1" in text


def test_json_is_one_line_of_stdout_and_the_rest_goes_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    report = Reporter(as_json=True, out=out, err=err)
    report.line("readable")
    report.table("t", ("a", "b"), [("[red]x", 1)])
    report.json({"nan": math.nan, "nested": {"inf": [math.inf, 1]}, "text": "zwei\nlines"})
    assert json.loads(out.getvalue()) == {"nan": None, "nested": {"inf": [None, 1]}, "text": "zwei\nlines"}
    assert out.getvalue().count("\n") == 1
    assert "readable" in err.getvalue()
    assert "[red]x" in err.getvalue()


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    err = io.StringIO()
    with Reporter(out=io.StringIO(), err=err).progress(100, title="train", plain_lines=4) as progress:
        for step in range(100):
            progress.advance(f"loss {step}")
    lines = err.getvalue().splitlines()
    assert lines[0] == "train   1/100  loss 0"
    assert lines[-1] == "train 100/100  loss 99"
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (305_400_000, "305 MB"), (1.5e12, "1.5 TB")]
)
def test_bytes_are_decimal(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.2e-4, "420 us"), (0.0123, "12.3 ms"), (1.923, "1.92 s"), (250, "4 min 10 s"), (7260, "2 h 1 min")],
)
def test_seconds_are_short(value: float, text: str) -> None:
    assert format_seconds(value) == text


class Terminal(io.StringIO):
    """Forty columns wide."""

    def isatty(self) -> bool:
        return True


def test_tables_on_a_narrow_terminal_are_folded_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    row = ("read", "2.93", "12.25", "threads 1M x 1 in 2 files", "1.46 ms", "2.81-3.06 50%", "11")
    Reporter(out=out).table("best", ("best, GB/s", "read", "write", "settings", "a piece", "likely", "n"), [row])
    text = out.getvalue()
    assert "…" not in text
    for word in " ".join(row).split():
        assert word in text
    assert min(len(line) for line in text.splitlines() if "━" in line) < 80

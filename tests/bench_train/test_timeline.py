"""Steps of traces, measured and simulated, drawn in the same lanes and colours."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.__main__ import main
from lamina.bench.timeline import COLOURS, OTHER, StepPicture, TimelineError, draw, read_step
from lamina.tiers.schedule.spans import Spans

TOY = (
    "--layers",
    "3",
    "--dim",
    "32",
    "--heads",
    "2",
    "--seq",
    "32",
    "--batch",
    "2",
    "--sample",
    "0",
    "--dtype",
    "fp32",
)


def trace_of(path: Path, *spans: tuple[str, str, float, float]) -> Path:
    recorded = Spans(enabled=True)
    for span in spans:
        recorded.add(*span)
    recorded.write(path)
    return path


def steps(*borders: float) -> list[tuple[str, str, float, float]]:
    return [("step", f"step {i + 1}", a, b) for i, (a, b) in enumerate(itertools.pairwise(borders))]


def test_the_step_of_median_length_is_cut_out_of_the_trace(tmp_path: Path) -> None:
    """Steps of 9, 2, 1 and 4 s: the first is left out, and of the others that of 2 s is the median one."""
    trace = trace_of(
        tmp_path / "run.json",
        *steps(100, 109, 111, 112, 116),
        ("compute", "forward", 108.5, 109.5),
        ("compute", "backward", 110, 110.75),
        ("Adam", "block", 110.5, 113),
        ("nvme->host: parameters", "block", 109.25, 110),
        ("nvme->host: parameters", "head", 109.5, 110.25),
        ("stall", "block", 112, 113),
    )
    picture = read_step(trace)
    assert picture.title == "run.json, step 2: 2.000 s"
    assert picture.step_s == pytest.approx(2)
    assert set(picture.lanes) == {"compute", "Adam", "nvme->host: parameters"}
    assert [span[1:] for span in picture.lanes["compute"]] == [pytest.approx((0, 0.5)), pytest.approx((1, 1.75))]
    assert picture.busy_s("compute") == pytest.approx(1.25)
    assert picture.busy_s("Adam") == pytest.approx(0.5)
    assert picture.busy_s("nvme->host: parameters") == pytest.approx(1)  # two transfers at a time count once
    assert read_step(trace, step=3).busy_s("Adam") == pytest.approx(1)
    with pytest.raises(TimelineError, match=r"run\.json has no step 5; there are: step 1 to step 4"):
        read_step(trace, step=5)


def test_a_trace_without_steps_is_taken_whole(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.json", ("compute", "forward", 5, 6), ("Adam", "block", 6, 8))
    assert read_step(trace).step_s == pytest.approx(3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [{"ph": "M", "tid"', "is not JSON, perhaps cut short"),
        (b"\xff\xfe\x00", "is not JSON, perhaps cut short"),
        (b"[]", "no Chrome trace with named lanes"),
        (b"null", "no Chrome trace with named lanes"),
        (b'{"traceEvents": {"a": 1}}', "no Chrome trace with named lanes"),
        (
            b'{"traceEvents": [{"ph": "X", "name": "a", "tid": 7, "ts": 0, "dur": 1}]}',
            "no Chrome trace with named lanes",
        ),
        (b'{"traceEvents": [{"ph": "M", "tid": 0, "args": {"name": "compute"}}]}', "there is nothing to draw"),
        (b'{"traceEvents": []}', "there is nothing to draw"),
    ],
)
def test_a_broken_trace_is_one_message_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "broken.json").write_bytes(content)
    assert main(["timeline", str(tmp_path / "broken.json")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "broken.json" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("span", [{"ts": 0, "dur": -1}, {"ts": float("nan"), "dur": 1}, {"ts": 0, "dur": float("inf")}])
def test_times_that_are_none_are_refused(tmp_path: Path, span: dict[str, float]) -> None:
    lane = {"ph": "M", "tid": 0, "args": {"name": "compute"}}
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps({"traceEvents": [lane, {"ph": "X", "name": "a", "tid": 0, **span}]}))
    with pytest.raises(TimelineError, match=r"t\.json: no Chrome trace: 'a' begins at"):
        read_step(trace)


def test_without_matplotlib_nothing_is_trained_and_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("lamina.bench.training.command.Demonstration.train", lambda *_, **__: pytest.fail("trained"))
    trace = trace_of(tmp_path / "t.json", ("compute", "forward", 5, 6))
    for command in (["train", *TOY, "--timeline", str(tmp_path / "t.png")], ["timeline", str(trace), "--png", "t.png"]):
        assert main(command) == 2
        assert "a timeline wants matplotlib: pip install 'lamina[plot]'" in capsys.readouterr().err
    assert main(["timeline", str(trace)]) == 0  # the table does without


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--size", "tiny", "--steps", "1"],
        ["plan", "gpt2", "--machine", "rtx4090"],
    ],
)
@pytest.mark.parametrize("file", ["run.json", "run.txt", "missing/run.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(
    command: list[str], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--timeline", file]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert file in told.err
    assert list(tmp_path.iterdir()) == []


def test_every_picture_has_the_same_lanes_in_the_same_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    real = StepPicture(
        title="real", step_s=2, lanes={"Adam": [("a", 0, 1)], "compute": [("f", 0, 2)], "new": [("x", 0, 1)]}
    )
    told = StepPicture(title="simulated", step_s=3, lanes={"compute": [("f", 0, 3)], "commit": [("c", 1, 2)]})
    draw([real, told], tmp_path / "p.png")
    axes = drawn[0].axes
    assert [axis.get_title() for axis in axes] == ["real", "simulated"]
    lanes = ["new", "commit", "Adam", "compute"]  # from the bottom
    for axis in axes:
        assert [label.get_text() for label in axis.get_yticklabels()] == lanes
        colours = [to_hex(bars.get_facecolor()[0]) if len(bars.get_paths()) else None for bars in axis.collections]
        wanted = [OTHER, COLOURS["commit"], COLOURS["Adam"], COLOURS["compute"]]
        assert all(got in (None, want) for got, want in zip(colours, wanted, strict=True))
        assert axis.get_xlim()[1] >= 3
    assert sum(len(bars.get_paths()) for axis in axes for bars in axis.collections) == 5


def test_a_run_and_a_simulation_are_drawn_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(900)))
    assert main(["train", *TOY, "--text", "text.txt", "--steps", "4", "--timeline", "run.png"]) == 0
    assert "timeline written to run.png, its trace to run.json" in capsys.readouterr().out
    small = ("layers=4,hidden=256,heads=4", "--machine", "rtx4090", "--no-barrier")
    placement = ("--option", "ZeRO-3 param nvme, optimizer nvme")
    assert main(["plan", *small, *placement, "--timeline", "plan.png"]) == 0
    capsys.readouterr()
    assert main(["timeline", "run.json", "plan.json", "--png", "both.png", "--json"]) == 0
    for picture in ("run.png", "plan.png", "both.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    run, plan = json.loads(capsys.readouterr().out)["traces"]
    both = {"compute", "Adam", "nvme->host: optimizer", "host->nvme: optimizer"}
    for trace in (run, plan):
        assert all(0 < trace["busy_s"][lane] <= trace["step_s"] * 1.001 for lane in both), trace
    assert "step 2" in plan["title"]

"""One step of a Chrome trace drawn in lanes of time: each link, compute, the optimizer.

Traces of runs (`lamina train --trace`) and of simulations (`lamina plan --timeline`) have the same lanes, so that pictures of
both can be laid side by side.
"""

import importlib.util
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.tiers.schedule.spans import STEP

COLOURS = {
    "compute": "#3b6ea5",
    "stall": "#b5506b",
    "nvme->host: parameters": "#d98c3f",
    "host->device": "#8c6d46",
    "nvme->host: optimizer": "#e3b23c",
    "Adam": "#5a9e6f",
    "host->nvme: optimizer": "#9a86b8",
    "commit": "#4aa3a2",
}
"""Lanes from top to bottom; others come below them."""
OTHER = "#7f7f7f"

Span = tuple[str, float, float]
"""Name, begin and end in seconds."""
Lanes = Mapping[str, Sequence[Span]]


class TimelineError(ValueError):
    """A trace that cannot be read or has no such step, or a picture that cannot be drawn."""


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """What happened in one step. Seconds count from where it began."""

    title: str
    step_s: float
    lanes: Lanes

    def busy_s(self, lane: str) -> float:
        """Seconds in which the lane had anything to do."""
        busy = reached = 0.0
        for _, began, ended in sorted(self.lanes.get(lane, ()), key=lambda span: span[1]):
            busy += max(0.0, ended - max(began, reached))
            reached = max(reached, ended)
        return busy


def read_step(path: Path, *, step: int | None = None, title: str = "") -> StepPicture:
    """A step of the trace file: number ``step``, or else the one of median length among all but the first, in which groups are
    fetched on demand. A trace without steps is taken whole.

    Raises OSError, and TimelineError for what is no trace or has no such step. An empty ``title`` says which step it is.
    """
    try:
        lanes = lanes_of(json.loads(path.read_bytes()))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TimelineError(
            f"{path} is not JSON, perhaps cut short ({error}): give a file of lamina train --trace"
        ) from error
    except TimelineError as error:
        raise TimelineError(f"{path}: {error}") from error
    name, began, ended = _chosen(lanes.pop(STEP, []), step, lanes, path)
    cut = {
        lane: [(what, max(a, began) - began, min(b, ended) - began) for what, a, b in spans if a < ended and b > began]
        for lane, spans in lanes.items()
    }
    shown = title or f"{path.name}, {name}: {ended - began:.3f} s"
    return StepPicture(title=shown, step_s=ended - began, lanes={lane: spans for lane, spans in cut.items() if spans})


def _chosen(steps: Sequence[Span], number: int | None, lanes: Lanes, path: Path) -> Span:
    spans = [span for lane in lanes.values() for span in lane]
    if not spans:
        raise TimelineError(f"there is nothing to draw: {path} has no spans")
    if number is not None:
        found = [span for span in steps if span[0] == f"{STEP} {number}"]
        if not found:
            there = f"{steps[0][0]} to {steps[-1][0]}" if steps else "none"
            raise TimelineError(f"{path} has no step {number}; there are: {there}")
        return found[-1]
    if not steps:
        return "the whole trace", min(span[1] for span in spans), max(span[2] for span in spans)
    settled = sorted(steps[1:] or steps, key=lambda span: span[2] - span[1])
    return settled[len(settled) // 2]


def lanes_of(trace: Any) -> dict[str, list[Span]]:
    """Lanes of a parsed Chrome trace, in its order. Raises TimelineError for what is none."""
    try:
        events = trace["traceEvents"]
        names = {event["tid"]: str(event["args"]["name"]) for event in events if event["ph"] == "M"}
        lanes: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                began, lasted = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
                if not (math.isfinite(began) and 0 <= lasted < math.inf):
                    raise TimelineError(f"no Chrome trace: {event['name']!r} begins at {began} s and lasts {lasted} s")
                lanes[names[event["tid"]]].append((str(event["name"]), began, began + lasted))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise TimelineError(f"no Chrome trace with named lanes ({type(error).__name__}: {error})") from error
    return lanes


def in_order(names: Iterable[str]) -> list[str]:
    """Lanes from top to bottom, each once."""
    there = dict.fromkeys(names)
    return [*(name for name in COLOURS if name in there), *(name for name in there if name not in COLOURS)]


def require_drawable(path: Path) -> None:
    """Raises TimelineError without matplotlib, or for a suffix that it does not draw: before anything is computed that only a
    picture would show."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TimelineError("a timeline wants matplotlib: pip install 'lamina[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase  # an extra, and slow to import

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise TimelineError(f"{path}: no picture is drawn as {path.suffix}; write .png, or one of {', '.join(formats)}")


def draw(pictures: Sequence[StepPicture], path: Path) -> None:
    """Write the steps one above the other, on one axis of time; the format follows from the file's suffix.

    Raises TimelineError without matplotlib or for a suffix that it does not know, OSError.
    """
    require_drawable(path)
    # An extra, and slow to import: only a picture needs it.
    from matplotlib.figure import Figure

    lanes = in_order(lane for picture in pictures for lane in picture.lanes)[::-1]
    figure = Figure(figsize=(11, (0.42 * len(lanes) + 0.7) * len(pictures) + 0.4), layout="constrained")
    axes = figure.subplots(len(pictures), sharex=True, squeeze=False)[:, 0]
    for axis, picture in zip(axes, pictures, strict=True):
        for row, lane in enumerate(lanes):
            axis.broken_barh(
                [(began, ended - began) for _, began, ended in picture.lanes.get(lane, ())],
                (row - 0.36, 0.72),
                facecolors=COLOURS.get(lane, OTHER),
                edgecolor="white",
                linewidth=0.4,
            )
        axis.axvline(picture.step_s, color="#404040", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(lanes)), lanes)
        axis.set_title(picture.title, fontsize=10)
    axes[-1].set_xlim(0, max(picture.step_s for picture in pictures) * 1.005)
    axes[-1].set_xlabel("seconds")
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise TimelineError(f"{path}: {error}") from error

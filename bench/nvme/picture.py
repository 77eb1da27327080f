"""The picture of a run: for each path and workload the rate over block size and queue depth (needs matplotlib)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle

from .outcome import Outcome, PathOutcome
from .points import Point, Workload, format_size
from .verdict import Summary, by_point, score, summarise

TITLES = {Workload.READ: "Read", Workload.WRITE: "Write", Workload.MIX: "Read and write at once"}
INK, MUTED, ACCENT = "#1b1f24", "#5f6b7a", "#d1495b"
COLOURS = matplotlib.colormaps["GnBu"].with_extremes(bad="#f3f5f7")
PANEL_W, PANEL_H = 4.4, 3.9


def draw(outcome: Outcome, file: Path) -> None:
    """Write the picture; the format follows the file's ending. Raises ValueError for an ending that is not known.

    Each row is a path; each column a workload, in colours for every point of the best backend, the best one framed; the
    last column compares what each workload reaches with and without huge pages, on fresh space, and in fio.
    """
    rows = [found for found in outcome.paths if found.best]
    columns = max((len(found.best) for found in rows), default=1)
    figure = Figure(figsize=(PANEL_W * columns + 4.2, PANEL_H * max(1, len(rows)) + 0.8), dpi=140)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.subplots(max(1, len(rows)), columns + 1, squeeze=False, width_ratios=[1.0] * columns + [0.85])
    for row, found in zip(axes, rows, strict=False):
        for axis, workload in zip(row, found.best, strict=False):
            _grid(axis, found, workload)
        for axis in row[len(found.best) : -1]:
            axis.set_axis_off()
        _bars(row[-1], found)
        row[0].set_ylabel(f"{found.path}\nblock size", color=INK, fontsize=9)
    _title(figure, rows)
    figure.savefig(file)


def check_ending(file: Path) -> None:
    """Raises ValueError for a kind of picture that cannot be written, before anything is measured."""
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in known:
        raise ValueError(
            f"{file}: no picture of this kind can be written; the ending may be {', '.join(sorted(known))}"
        )


def _title(figure: Figure, rows: Sequence[PathOutcome]) -> None:
    names = "; ".join(dict.fromkeys(str(found.identity) for found in rows))
    how = "direct I/O" if all(found.created.direct for found in rows) else "partly through the page cache"
    figure.suptitle(f"{names}: bandwidth in GB/s, {how}", x=0.01, ha="left", fontsize=12, color=INK)


def _grid(axis: Axes, found: PathOutcome, workload: Workload) -> None:
    """Block sizes up, queue depths to the right, the figure in each cell; what was not tried stays empty."""
    top = found.best[workload].point
    cells: dict[tuple[int, int], float] = {}
    for point, runs in by_point(found.results, workload).items():
        if point.backend == top.backend:
            key = (point.block_bytes, point.queue_depth)
            cells[key] = max(cells.get(key, 0.0), score(runs) / 1e9)
    # The same axes for all workloads, so that places can be compared.
    points = {result.trial.point for result in found.results}
    blocks = sorted({point.block_bytes for point in points})
    depths = sorted({point.queue_depth for point in points})
    values = np.full((len(blocks), len(depths)), np.nan)
    for (block, depth), rate in cells.items():
        values[blocks.index(block), depths.index(depth)] = rate
    most = float(np.nanmax(values))
    axis.imshow(values, origin="lower", aspect="auto", cmap=COLOURS, vmin=0.0, vmax=1.1 * most)
    for (row, column), rate in np.ndenumerate(values):
        if not np.isnan(rate):
            ink = "white" if rate > 0.6 * most else INK
            axis.text(column, row, f"{rate:.2f}", ha="center", va="center", fontsize=7.5, color=ink)
    _frame(axis, top, blocks, depths)
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    axis.set_yticks(range(len(blocks)), [format_size(block) for block in blocks], fontsize=8)
    axis.set_xlabel("queue depth", fontsize=9, color=INK)
    best = found.best[workload]
    axis.set_title(
        f"{TITLES[workload]}: {best.rate.median / 1e9:.2f} GB/s\n{best.point}", fontsize=9.5, loc="left", color=INK
    )
    axis.tick_params(length=0, colors=MUTED)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xticks(np.arange(len(depths) + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(len(blocks) + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="minor", length=0)


def _frame(axis: Axes, top: Point, blocks: Sequence[int], depths: Sequence[int]) -> None:
    """A frame around the best point."""
    x, y = depths.index(top.queue_depth), blocks.index(top.block_bytes)
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=ACCENT, linewidth=2.2, zorder=3))


def _bars(axis: Axes, found: PathOutcome) -> None:
    """What changes the figure, one group for each workload, with the interval that likely holds the median."""
    groups = [list(_group(found, workload)) for workload in found.best]
    places, bars = [], []
    place = 0.0
    for group in groups:
        for bar in group:
            places.append(place)
            bars.append(bar)
            place -= 1.0
        place -= 0.7
    values = np.array([bar.median for bar in bars]) / 1e9
    low = values - np.array([bar.low for bar in bars]) / 1e9
    high = np.array([bar.high for bar in bars]) / 1e9 - values
    axis.barh(places, values, height=0.78, color=[bar.colour for bar in bars])
    axis.errorbar(values, places, xerr=[low, high], fmt="none", ecolor=MUTED, elinewidth=1.1, capsize=2)
    reach = float((values + high).max())
    for place, value, above in zip(places, values, high, strict=True):
        axis.text(value + above + 0.02 * reach, place, f"{value:.2f}", va="center", fontsize=8, color=INK)
    axis.set_yticks(places, [bar.name for bar in bars], fontsize=8)
    axis.set_xlim(0, 1.16 * reach)
    axis.set_xlabel("GB/s", fontsize=9, color=INK)
    axis.set_title("What makes the difference", fontsize=9.5, loc="left", color=INK)
    axis.tick_params(length=0, colors=MUTED)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#d0d7de")
    axis.grid(axis="x", color="#e6e9ed", linewidth=0.8)
    axis.set_axisbelow(True)


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """One line of the chart, bytes per second."""

    name: str
    median: float
    low: float
    high: float
    colour: str


def _group(found: PathOutcome, workload: Workload) -> Iterator[_Bar]:
    def of(name: str, summary: Summary, colour: str) -> _Bar:
        return _Bar(name=name, median=summary.median, low=summary.low, high=summary.high, colour=colour)

    yield of(f"{workload}, best", found.best[workload].rate, "#24527a")
    effect = found.pages.get(workload)
    if effect is not None:
        yield of("huge pages", effect.huge, "#5b8db8")
        yield of("4 KiB pages", effect.small, "#a9c6de")
    for pair in found.fio:
        if pair.workload is workload:
            yield of("ours, in turn with fio", summarise(pair.ours), "#5b8db8")
            yield of("fio", summarise(pair.fio), "#d9a441")
    if workload is Workload.WRITE:
        first = found.created.first_write
        yield _Bar(name="fresh space", median=first, low=first, high=first, colour="#b0b7c0")

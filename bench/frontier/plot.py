"""The picture of `frontier`: step time over memory, one panel per size. Needs matplotlib, which is imported when it is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.bench.frontier.modes import WANTED

STYLES = {"lamina": ("o-", "C0"), "deepspeed": ("s", "C1"), "torch": ("^", "C2")}
NAMES = {"lamina": "lamina (device+host bytes per parameter)", "deepspeed": "DeepSpeed", "torch": "plain PyTorch"}
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run: its peak memory in bytes and its step in seconds."""

    system: str
    name: str
    peak_bytes: float
    step_s: float

    @property
    def label(self) -> str:
        """Short, as the legend tells what the numbers are."""
        return self.name.removesuffix(" B/param")


def draw(path: str, sizes: Mapping[str, Sequence[Point]]) -> None:
    """Both axes begin at nothing, so that distances are ratios; dotted boxes are what is wanted beside DeepSpeed's points.

    Raises ImportError without matplotlib, OSError when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(sizes), figsize=(6.5 * len(sizes), 6), squeeze=False)
    for panel, (size, points) in zip(panels[0], sizes.items(), strict=True):
        _draw_panel(panel, points)
        panel.set_title(f"{size} parameters: nearer to the corner is better")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(panel: Any, points: Sequence[Point]) -> None:
    for system, (marker, colour) in STYLES.items():
        own = sorted((p for p in points if p.system == system), key=lambda p: p.peak_bytes)
        if not own:
            continue
        line = [point for point in own if point.name != "in memory"] or own
        panel.plot(*_coordinates(line), marker, color=colour, label=NAMES[system])
        panel.plot(*_coordinates([point for point in own if point not in line]), marker[0], color=colour)
        for point in own:
            x, y = point.peak_bytes / GIB, point.step_s
            panel.annotate(point.label, (x, y), textcoords="offset points", xytext=(6, 5), fontsize=8, color=colour)
    peers = {point.name: point for point in points if point.system == "deepspeed"}
    for wanted in WANTED:
        peer = peers.get(wanted.peer)
        if peer is not None:
            width, height = wanted.memory * peer.peak_bytes / GIB, peer.step_s / wanted.speed
            panel.plot([0, width, width], [height, height, 0], ":", color="0.6", linewidth=1, label=wanted.box)
    panel.set(xlabel="peak memory above importing torch (GiB)", ylabel="step (s)")
    panel.set_xlim(0, 1.15 * max((point.peak_bytes / GIB for point in points), default=1))
    panel.set_ylim(0, 1.1 * max((point.step_s for point in points), default=1))
    panel.grid(alpha=0.25)
    if points:
        # Under the axes: anywhere within them it may hide a point.
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.peak_bytes / GIB for point in points], [point.step_s for point in points]

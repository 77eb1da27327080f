"""Draws a plan: bytes of each tier by kind and placement against the limit, and seconds of each channel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamina.bench.planner.rows import rows_of
from lamina.engine.planner import Option, Plan, PlanError
from lamina.engine.planner.fit import TierUse
from lamina.engine.planner.items import Kind
from lamina.engine.planner.quantity import GB, format_bytes

_COLOURS = {
    Kind.PARAMETERS: "#3b6ea5",
    Kind.MASTER: "#6fa3d8",
    Kind.MOMENTS: "#a9cbe8",
    Kind.GRADIENTS: "#d98c3f",
    Kind.IN_FLIGHT: "#f0b878",
    Kind.WINDOW: "#5a9e6f",
    Kind.BUCKETS: "#8cc39c",
    Kind.PINNED: "#b9dcc2",
    Kind.ACTIVATIONS: "#b5506b",
    Kind.CHECKPOINTS: "#d98aa0",
    Kind.LOGITS: "#eec0cd",
    Kind.FRAGMENTS: "#d9d0c3",
    Kind.COPIES: "#cfe3a8",
    Kind.STAGING: "#c8b6dd",
    Kind.BUILD: "#9a86b8",
    Kind.RUNTIME: "#9c9c9c",
}
_CHANNEL_COLOURS = ("#3b6ea5", "#5a9e6f", "#d98c3f", "#b5506b", "#9a86b8", "#8c6d46", "#4aa3a2", "#9c9c9c")
_HATCH = "////"


def draw(answer: Plan, path: Path, *, most: int = 14) -> None:
    """Write a picture of the fastest `most` placements; the format follows from the file's suffix.

    Raises PlanError when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--plot wants matplotlib: pip install 'lamina[plot]'") from error
    rows = list(reversed(list(rows_of(answer.options))[:most]))
    options = [item for _, item in rows]
    tiers = [use.tier for use in options[0].verdict.tiers]
    tiers = [tier for tier in tiers if any(_use(item, tier).need for item in options)]
    figure = Figure(figsize=(4.6 * (len(tiers) + 1) + 2.2, 0.42 * len(options) + 2.6), layout="constrained")
    axes = figure.subplots(1, len(tiers) + 1, sharey=True)
    for axis, tier in zip(axes, tiers, strict=False):
        _draw_tier(axis, options, tier, shared=answer.question.machine.shared_memory)
    _draw_time(axes[-1], options)
    labels = [label if item.runs else f"{label} (not here)" for label, item in rows]
    axes[0].set_yticks(range(len(options)), labels)
    best = answer.best
    for label, item in zip(axes[0].get_yticklabels(), options, strict=True):
        label.set_fontweight("bold" if item is best else "normal")
        label.set_color("black" if item.fits and item.runs else "#a0a0a0")
    model, machine = answer.question.model, answer.question.machine
    figure.suptitle(
        f"{model.name} on {machine.name}" + (f": {best.label} recommended" if best else ": nothing fits"),
        fontsize=12,
    )
    figure.legend(*_legend(axes[:-1]), loc="outside lower left", ncols=6, fontsize=8, frameon=False, title="bytes")
    title = "busy seconds (hatched: update; line: the step)"
    figure.legend(*_legend(axes[-1:]), loc="outside lower right", ncols=3, fontsize=8, frameon=False, title=title)
    figure.savefig(path, dpi=130)


def _use(item: Option, tier: str) -> TierUse:
    return next(use for use in item.verdict.tiers if use.tier == tier)


def _draw_tier(axis: Any, options: Sequence[Option], tier: str, *, shared: bool) -> None:
    for row, item in enumerate(options):
        left = 0.0
        for kind in Kind:
            width = _use(item, tier).by_kind.get(kind, 0) / GB
            if width:
                axis.barh(row, width, left=left, color=_COLOURS[kind], label=kind.value, height=0.72)
                left += width
    limit = _use(options[0], tier).limit / GB
    most = max(_use(item, tier).need for item in options) / GB
    if limit <= 4 * most:
        axis.axvline(limit, color="black", linewidth=1.2, linestyle="--")
    unit = "one rank" if tier == "device" else "one host"
    name = "memory" if shared and tier == "host" else tier
    axis.set_title(f"{name} ({unit}), limit {format_bytes(limit * GB)}", fontsize=10)
    axis.set_xlabel("GB at the peak phase")
    _clean(axis)


def _draw_time(axis: Any, options: Sequence[Option]) -> None:
    names = sorted({name for item in options for name in {**item.time.passes, **item.time.update}})
    colours = dict(zip(names, _CHANNEL_COLOURS, strict=False))
    height = 0.72 / max(len(names), 1)
    for row, item in enumerate(options):
        for slot, name in enumerate(names):
            at = row + 0.36 - (slot + 0.5) * height
            passes, update = item.time.passes.get(name, 0.0), item.time.update.get(name, 0.0)
            axis.barh(at, passes, color=colours[name], height=height, label=name)
            axis.barh(at, update, left=passes, color=colours[name], height=height, hatch=_HATCH, alpha=0.7)
        axis.plot([item.time.step_s] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1.4)
    axis.set_title("a step by channel", fontsize=10)
    axis.set_xlabel("s")
    _clean(axis)


def _clean(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#e5e5e5")
    axis.set_axisbelow(True)


def _legend(axes: Sequence[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)

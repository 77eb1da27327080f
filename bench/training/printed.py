"""What `lamina train` says about a run: the progress text, the tables at the end, the comparison."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamina.bench.generate import printable
from lamina.bench.report import Reporter, format_bytes, format_seconds
from lamina.bench.training.args import TrainingRun
from lamina.engine.metrics import StepMetrics

IN_MEMORY_BYTES_PER_PARAMETER = 16
"""bf16: parameter 2, gradient 2, master 4, two moments 8; fp32: parameter 4, gradient 4, two moments 8."""
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
CURVE_ROWS = 12


@dataclass(kw_only=True)
class Outcome:
    """What one training run gave. Losses in nats per byte, times in seconds, sizes in bytes."""

    name: str
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    metrics: list[StepMetrics] = field(default_factory=list)
    held_out_before: float = math.nan
    held_out_after: float = math.nan
    setup_s: float = 0.0
    training_s: float = 0.0
    """All steps, their data and the progress display."""
    rss_before: int = 0
    """Resident before the model was built: interpreter, torch and the text."""
    setup_peak_rss: int = 0
    """Most resident while the model was built and its state taken to the tiers."""
    peak_rss: int = 0
    """Most resident while it was evaluated and trained."""
    sample: tuple[bytes, bytes] = (b"", b"")
    """Prompt and what the model added."""
    placement: str = ""
    interrupted: bool = False


def total_by_key(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of the values under each key, in order of first appearance."""
    totals: dict[str, float] = {}
    for key, value in itertools.chain.from_iterable(mapping.items() for mapping in mappings):
        totals[key] = totals.get(key, 0) + value
    return totals


def peak_by_key(mappings: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Largest value under each key."""
    peaks: dict[str, int] = {}
    for key, value in itertools.chain.from_iterable(mapping.items() for mapping in mappings):
        peaks[key] = max(peaks.get(key, 0), value)
    return peaks


def progress_text(loss: float, tokens: int, step: StepMetrics) -> str:
    """One step in one line."""
    rate = tokens / step.step_s if step.step_s else 0.0
    links = "".join(f"  {link} {gbps:.2f} GB/s" for link, gbps in step.link_gbps.items() if gbps >= 0.005)
    return f"loss {loss:.3f}  {rate:,.0f} tokens/s{links}  stalled {step.stalled_share:.0%}"


def in_memory_bytes(run: TrainingRun) -> tuple[int, int]:
    """What training without tiers needs: state, and activations of one micro-batch."""
    state = IN_MEMORY_BYTES_PER_PARAMETER * run.shape.num_params
    return state, run.shape.activation_bytes(batch=run.batch, itemsize=ITEMSIZE[run.dtype])


def describe_run(report: Reporter, run: TrainingRun, source: str, text_bytes: int) -> None:
    """What is about to be trained."""
    shape = run.shape
    report.line(
        f"{run.size}: {shape.num_params / 1e6:.1f} M parameters ({shape.layers} layers, dim {shape.dim}, "
        f"{shape.heads} heads, {'tied' if shape.tied else 'untied'} head), {run.dtype}, {run.steps} steps of "
        f"{run.accum} x {run.batch} x {shape.seq} bytes, seed {run.seed}"
    )
    report.line(f"text: {format_bytes(text_bytes)} of {source}")


def print_outcome(report: Reporter, run: TrainingRun, outcome: Outcome) -> None:
    """Loss, sample, memory, bytes moved and the split of the time."""
    report.line()
    if not math.isnan(outcome.held_out_after):
        report.line(
            f"held-out loss {outcome.held_out_before:.3f} before, {outcome.held_out_after:.3f} after "
            f"{len(outcome.losses)} steps in {format_seconds(outcome.training_s)}"
        )
    elif outcome.losses:
        report.line(f"{len(outcome.losses)} of {run.steps} steps, last training loss {outcome.losses[-1]:.3f}")
    prompt, added = outcome.sample
    if added:
        report.line(f"sample, after the prompt {printable(prompt)!r}:")
        report.line("\n".join(f"  | {line}" for line in printable(prompt + added).splitlines()))
    report.line()
    print_memory(report, run, outcome)
    if outcome.metrics:
        print_links(report, outcome)
        print_times(report, run, outcome)


def print_memory(report: Reporter, run: TrainingRun, outcome: Outcome) -> None:
    """Peaks of the tiers beside what training in memory takes."""
    state, activations = in_memory_bytes(run)
    tiers = run.config.get("tiers", {})
    overhead = overhead_bytes(run, outcome)
    rows = [
        (f"{tier} tier", format_bytes(peak), _budget(tiers.get(f"{tier}_bytes")))
        for tier, peak in peak_by_key([step.peak_bytes for step in outcome.metrics]).items()
    ]
    rows += [
        ("activations of a micro-batch", format_bytes(activations), ""),
        ("process: peak resident in training", format_bytes(outcome.peak_rss), ""),
        ("  of that neither tiers, activations nor before", format_bytes(overhead), ""),
        ("process: peak while the model was built", format_bytes(outcome.setup_peak_rss), ""),
        ("process: resident before", format_bytes(outcome.rss_before), ""),
        (
            f"in memory: {IN_MEMORY_BYTES_PER_PARAMETER} B x {run.shape.num_params:,} + activations",
            f"{format_bytes(state)} + {format_bytes(activations)}",
            "",
        ),
    ]
    report.table("memory", ("", "peak", "budget"), rows)


def overhead_bytes(run: TrainingRun, outcome: Outcome) -> int:
    """Peak of training beyond what was resident before, the memory tiers' peaks and the activations.

    PyTorch's workspaces and what the allocator keeps.
    """
    peaks = peak_by_key([step.peak_bytes for step in outcome.metrics])
    tiers = sum(peak for tier, peak in peaks.items() if tier != "nvme")
    _, activations = in_memory_bytes(run)
    return max(0, outcome.peak_rss - outcome.rss_before - tiers - activations)


def _budget(value: object) -> str:
    return format_bytes(value) if isinstance(value, int) else "none" if value is None else str(value)


def print_links(report: Reporter, outcome: Outcome) -> None:
    """Bytes moved on each link: in all, and by a steady step."""
    steps = outcome.metrics
    steady = steady_steps(steps)
    seconds = sum(step.step_s for step in steady)
    in_steady = total_by_key([step.link_bytes for step in steady])
    stalled = total_by_key([step.stalled_s for step in steady])
    moved = total_by_key([step.link_bytes for step in steps])
    rows = [
        (
            link,
            format_bytes(nbytes),
            format_bytes(in_steady.get(link, 0) / len(steady)),
            f"{in_steady.get(link, 0) / seconds / 1e9:.2f}",
            f"{stalled.get(link, 0.0) / seconds:.1%}",
        )
        for link, nbytes in moved.items()
    ]
    waits = [(name, "", "", "", f"{value / seconds:.1%}") for name, value in stalled.items() if name not in moved]
    report.table("links", ("", "moved", "per step", "GB/s", "training stalled"), rows + waits)
    report.line(f"written to NVMe since the start: {format_bytes(steps[-1].nvme_written_bytes)}")
    report.line()


def steady_steps(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """All but the first step, which also pays for what came before it; that one where it is the only one."""
    return steps[1:] or steps


def step_split(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Medians over the steady steps: seconds of a step and of its parts, share stalled, ratio to the bound."""
    steady = steady_steps(steps)
    parts = ("step_s", "forward_s", "backward_s", "update_s", "commit_s", "lower_bound_s")
    medians = {part: statistics.median(getattr(step, part) for step in steady) for part in parts}
    bounded = [step.lower_bound_ratio for step in steady if step.lower_bound_s]
    return medians | {
        "stalled_share": statistics.median(step.stalled_share for step in steady),
        "lower_bound_ratio": statistics.median(bounded) if bounded else 0.0,
    }


def print_times(report: Reporter, run: TrainingRun, outcome: Outcome) -> None:
    """The median step and how far it is from its lower bound."""
    split = step_split(outcome.metrics)
    whole = split["step_s"] or math.inf
    names = {"forward_s": "forward", "backward_s": "backward", "update_s": "update", "commit_s": "commit"}
    rows = [(name, format_seconds(split[key]), f"{split[key] / whole:.0%}") for key, name in names.items()]
    rows.append(("step", format_seconds(split["step_s"]), "100%"))
    report.table("median step", ("", "time", "share"), rows)
    if split["lower_bound_s"]:
        report.line(
            f"lower bound {format_seconds(split['lower_bound_s'])}, ratio {split['lower_bound_ratio']:.2f}; "
            f"{run.tokens_per_step / whole:,.0f} tokens/s"
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two loss curves of the same length differ."""

    bit_equal: bool
    largest: float
    """Largest absolute difference, nats."""
    largest_relative: float
    step: int
    """Where the largest difference is; -1 when there is none."""


def compare_curves(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Compare loss by loss. Two NaNs are the same. ValueError when the lengths differ."""
    pairs = list(zip(one, other, strict=True))
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in pairs]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    relative = [gap / abs(b) if gap and b else gap for gap, (_, b) in zip(gaps, pairs, strict=True)]
    largest = max(gaps, default=0.0)
    return Difference(
        bit_equal=largest == 0.0,
        largest=largest,
        largest_relative=max(relative, default=0.0),
        step=gaps.index(largest) if largest else -1,
    )


def print_comparison(report: Reporter, run: TrainingRun, ours: Outcome, others: Sequence[Outcome]) -> None:
    """The curves side by side, then the largest difference of each from the first."""
    every = max(1, -(-len(ours.losses) // CURVE_ROWS))
    shown = [step for step in range(len(ours.losses)) if step % every == 0 or step == len(ours.losses) - 1]
    columns = ("step", ours.name, *(other.name for other in others))
    rows = [(step, *(f"{run.losses[step]:.6f}" for run in (ours, *others))) for step in shown]
    report.table("loss", columns, rows)
    for other in others:
        difference = compare_curves(ours.losses, other.losses)
        if difference.bit_equal:
            verdict = "bit-equal"
        else:
            verdict = (
                f"NOT bit-equal, largest difference {difference.largest:.3g} "
                f"({difference.largest_relative:.2g} relative) at step {difference.step}"
            )
        report.line(f"{ours.name} against {other.name}: {verdict} over {len(ours.losses)} steps")
        report.line(f"  held-out loss {ours.held_out_after!r} and {other.held_out_after!r}")
    if run.dtype == "bf16":
        report.line(
            "(bf16: a master exactly between two bf16 numbers is rounded away from zero here and to even by "
            "PyTorch, so that their curves differ a little)"
        )

"""The JSON of `lamina train`: everything about a run as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from lamina.bench.generate import printable
from lamina.bench.training.args import TrainingRun
from lamina.bench.training.corpus import Corpus
from lamina.bench.training.printed import (
    Outcome,
    compare_curves,
    in_memory_bytes,
    overhead_bytes,
    peak_by_key,
    step_split,
    total_by_key,
)


def result(
    args: Mapping[str, Any],
    machine: Mapping[str, object],
    run: TrainingRun,
    corpus: Corpus,
    ours: Outcome,
    others: Sequence[Outcome],
) -> dict[str, Any]:
    """Losses in nats per byte, times in seconds, sizes in bytes."""
    state, activations = in_memory_bytes(run)
    return {
        "command": "train",
        "args": dict(args),
        "machine": dict(machine),
        "model": {
            "size": run.size,
            "parameters": run.shape.num_params,
            "layers": run.shape.layers,
            "dim": run.shape.dim,
            "heads": run.shape.heads,
            "seq": run.shape.seq,
            "tied": run.shape.tied,
        },
        "run": {
            "batch": run.batch,
            "accum": run.accum,
            "steps": run.steps,
            "dtype": run.dtype,
            "seed": run.seed,
            "config": run.engine_config(),
        },
        "text": {
            "source": corpus.source,
            "bytes": len(corpus.text),
            "files": corpus.num_files,
            "skipped_files": corpus.skipped_files,
        },
        "in_memory": {"state_bytes": state, "activation_bytes": activations},
        "interrupted": ours.interrupted,
        **outcome_result(ours, run),
        "comparisons": [outcome_result(other, run) | {"difference": difference(ours, other)} for other in others],
    }


def difference(ours: Outcome, other: Outcome) -> dict[str, Any]:
    """How another run's losses differ from ours."""
    found = compare_curves(ours.losses, other.losses)
    return {
        "bit_equal": found.bit_equal,
        "held_out_equal": ours.held_out_after == other.held_out_after,
        "largest": found.largest,
        "largest_relative": found.largest_relative,
        "step": found.step,
    }


def outcome_result(outcome: Outcome, run: TrainingRun) -> dict[str, Any]:
    """One training run."""
    steps = outcome.metrics
    prompt, added = outcome.sample
    moved = total_by_key([step.link_bytes for step in steps])
    return {
        "name": outcome.name,
        "losses": outcome.losses,
        "rates": outcome.rates,
        "held_out": {"before": outcome.held_out_before, "after": outcome.held_out_after},
        "sample": {"prompt": printable(prompt), "text": printable(added)},
        "placement": outcome.placement,
        "peak_bytes": peak_by_key([step.peak_bytes for step in steps]),
        "link_bytes": moved,
        "stalled_s": total_by_key([step.stalled_s for step in steps]),
        "nvme_written_bytes": steps[-1].nvme_written_bytes if steps else 0,
        "median_step": step_split(steps) if steps else {},
        "setup_s": outcome.setup_s,
        "training_s": outcome.training_s,
        "tokens_per_s": len(outcome.losses) * run.tokens_per_step / outcome.training_s if outcome.training_s else 0.0,
        "process": {
            "peak_rss_bytes": max(outcome.setup_peak_rss, outcome.peak_rss),
            "setup_peak_rss_bytes": outcome.setup_peak_rss,
            "training_peak_rss_bytes": outcome.peak_rss,
            "rss_before_bytes": outcome.rss_before,
            "overhead_bytes": overhead_bytes(run, outcome),
        },
        "steps": [step.as_dict() for step in steps],
    }

"""What a step prints: the progress line, how its time splits, and what the tiers hold."""

from collections.abc import Iterator, Sequence

from .config import EngineConfig
from .metrics import StepMetrics


def progress_lines(
    config: EngineConfig, metrics: StepMetrics, *, skipped_steps: int, rates: Sequence[float]
) -> Iterator[str]:
    """Lines for a step that steps_per_print names (every step for the breakdowns, when it names none)."""
    every = config.steps_per_print
    if every is not None and metrics.step % every:
        return
    if every is not None:
        shown = ", ".join(f"{rate:.6g}" for rate in rates)
        loss = f", loss={metrics.loss:.6g}" if metrics.loss is not None else ""
        scale = f", loss_scale={metrics.loss_scale:g}" if config.fp16.enabled else ""
        yield (
            f"step={metrics.step}, skipped={skipped_steps}, lr=[{shown}]{loss}, grad_norm={metrics.grad_norm:.6g}{scale}, "
            f"step_s={metrics.step_s:.3f}"
        )
    if config.wall_clock_breakdown:
        stalled = sum(metrics.stalled_s.values())
        other = max(0.0, metrics.step_s - metrics.forward_s - metrics.backward_s - metrics.update_s - metrics.commit_s)
        yield (
            f"  time: forward {metrics.forward_s * 1e3:.1f} ms, backward {metrics.backward_s * 1e3:.1f} ms, update "
            f"{metrics.update_s * 1e3:.1f} ms, commit {metrics.commit_s * 1e3:.1f} ms, between {other * 1e3:.1f} ms; of it "
            f"stalled {stalled * 1e3:.1f} ms, communication {metrics.communication_share:.1%}"
        )
    if config.memory_breakdown:
        peaks = ", ".join(f"{tier} {nbytes:,}" for tier, nbytes in metrics.peak_bytes.items())
        yield f"  peak bytes: {peaks}; written to nvme so far {metrics.nvme_written_bytes:,}"

"""Idle share of a pipeline."""

from fractions import Fraction

from lamina.engine.planner.errors import PlanError


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> Fraction:
    """Idle share of a 1F1B pipeline: (p - 1) / (v * m + p - 1), v model chunks per stage when interleaved."""
    for name, value in (("pipeline stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise PlanError(f"{name}: {value} must be at least 1")
    return Fraction(stages - 1, chunks * micro_batches + stages - 1)

"""How long drives last under a training run."""

from dataclasses import dataclass

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.quantity import TB


@dataclass(frozen=True, kw_only=True)
class Wear:
    """Writes of one host's drives."""

    bytes_per_step: float
    steps_to_rated: int | None
    """Whole steps until the rated endurance is written; None when nothing is written."""
    days_to_rated: float | None
    """The same in days of uninterrupted training; None when the step time is not known or nothing is
    written."""


def drive_wear(*, bytes_per_step: float, rated_tbw: float, drives: int = 1, step_s: float | None = None) -> Wear:
    """``rated_tbw``: terabytes written (10^12) that one drive is rated for; writes are spread over
    ``drives``."""
    if rated_tbw <= 0 or drives < 1:
        raise PlanError(
            f"drive endurance: rated_tbw={rated_tbw} must be above 0 and drives={drives} at least 1 "
            "(give the TBW figure of the drive's data sheet)"
        )
    if bytes_per_step <= 0:
        return Wear(bytes_per_step=0.0, steps_to_rated=None, days_to_rated=None)
    steps = int(rated_tbw * TB * drives // bytes_per_step)
    days = None if step_s is None else steps * step_s / 86400
    return Wear(bytes_per_step=float(bytes_per_step), steps_to_rated=steps, days_to_rated=days)

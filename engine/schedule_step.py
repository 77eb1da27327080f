"""Steps a learning-rate schedule after an optimizer step that was taken."""

import warnings
from typing import Any


def advance_schedule(schedule: Any) -> None:
    """Call its ``step()``. torch's schedules warn when the optimizer's own ``step`` was not called before theirs; here
    the engine's was, so that warning is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        schedule.step()

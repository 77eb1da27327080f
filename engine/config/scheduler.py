"""The block `scheduler`: type and parameters of a learning-rate schedule."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lamina.engine.config.block import Block
from lamina.engine.config.quantities import Count, PositiveCount


def _group_values(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


NonNegative = Annotated[float, Field(ge=0)]
PerGroup = Annotated[NonNegative | tuple[NonNegative, ...], BeforeValidator(_group_values)]
"""One number for all param groups, or a list with one for each."""
WarmupType = Literal["log", "linear"]


class WarmupLRParams(Block):
    """Rise from `warmup_min_lr` to `warmup_max_lr`, then constant."""

    warmup_min_lr: PerGroup = Field(default=0.0, description="first rate")
    warmup_max_lr: PerGroup | None = Field(
        default=None, description="rate after the warm-up; null: the optimizer's own rates"
    )
    warmup_num_steps: Count = Field(default=1000, description="steps of the warm-up; 0: none")
    warmup_type: WarmupType = Field(default="log", description="shape of the rise")


class WarmupDecayLRParams(WarmupLRParams):
    """Rise, then fall linearly to `warmup_min_lr` at `total_num_steps`."""

    total_num_steps: PositiveCount = Field(description="steps of the whole run")


class WarmupCosineLRParams(Block):
    """Rise, then fall as a cosine; all ratios are of the optimizer's own rates."""

    total_num_steps: PositiveCount = Field(description="steps of the whole run")
    warmup_min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="first ratio")
    warmup_num_steps: Count = Field(default=1000, description="steps of the warm-up; 0: none")
    cos_min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=1e-4, description="last ratio")
    warmup_type: WarmupType = Field(default="log", description="shape of the rise")


class OneCycleParams(Block):
    """Rate up and down (momentum the other way), then decay."""

    cycle_min_lr: PerGroup = Field(description="rate at the ends of the cycle")
    cycle_max_lr: PerGroup = Field(description="rate at its peak")
    decay_lr_rate: NonNegative = Field(default=0.0, description="decay after the cycle")
    cycle_first_step_size: PositiveCount = Field(default=2000, description="steps up")
    cycle_second_step_size: PositiveCount | None = Field(default=None, description="steps down; null: as up")
    cycle_first_stair_count: Count = Field(default=0, description="stairs on the way up; 0: smooth")
    cycle_second_stair_count: Count | None = Field(default=None, description="stairs on the way down; null: as up")
    decay_step_size: Count = Field(default=0, description="steps per unit of decay; 0: no decay")
    cycle_momentum: bool = Field(default=True, description="cycle the momentum (Adam: beta1) as well")
    cycle_min_mom: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.8, description="momentum at the peak")
    cycle_max_mom: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="momentum at the ends")
    decay_mom_rate: NonNegative = Field(default=0.0, description="decay of the momentum after the cycle")


class LRRangeTestParams(Block):
    """Rise without end, to find the largest usable rate."""

    lr_range_test_min_lr: PerGroup = Field(default=1e-3, description="first rate")
    lr_range_test_step_size: PositiveCount = Field(default=2000, description="steps per unit of growth")
    lr_range_test_step_rate: NonNegative = Field(default=1.0, description="growth per step_size steps, in first rates")
    lr_range_test_staircase: bool = Field(default=False, description="grow in stairs")


SchedulerParams = WarmupLRParams | WarmupDecayLRParams | WarmupCosineLRParams | OneCycleParams | LRRangeTestParams
SCHEDULES: dict[str, type[Block]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}


class SchedulerConfig(Block):
    """`params` is the model that belongs to `type`; its dump is the schedule's keyword arguments."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"] = Field(
        description="name of the schedule"
    )
    params: SchedulerParams


def schedule_name(given: object) -> tuple[str | None, str | None]:
    """The schedule's canonical name, or None and what is wrong with `given`."""
    listed = ", ".join(SCHEDULES)
    if given is None:
        return None, f"is required: one of {listed}"
    if given == "auto":
        return None, f'is "auto", which decides nothing here: write one of {listed}'
    if not isinstance(given, str):
        return None, f"want a string, one of {listed}; got {given!r} ({type(given).__name__})"
    for name in SCHEDULES:
        if given.lower() == name.lower():
            return name, None
    near = difflib.get_close_matches(given, list(SCHEDULES), n=1, cutoff=0.5)
    likely = f"; did you mean {near[0]}?" if near else ""
    return (
        None,
        f"{given!r} is not one of {listed}{likely}; any other schedule is passed as lr_scheduler= to initialize()",
    )

"""Number formats: the blocks `fp16`, `bf16` and `data_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lamina.engine.config.block import Block, hint
from lamina.engine.config.quantities import Count, PositiveCount

DTypeName = Literal["fp32", "fp16", "bf16"]


class Fp16Config(Block):
    """Training in fp16 with fp32 masters and a loss scale."""

    enabled: bool = Field(default=False, description="compute in fp16")
    auto_cast: bool = Field(default=False, description="cast floating-point inputs of the model to fp16")
    loss_scale: Annotated[float, Field(ge=0)] = Field(default=0.0, description="0: dynamic; else the fixed scale")
    initial_scale_power: Annotated[Count, Field(le=126)] = Field(
        default=16, description="first dynamic scale is 2 to this power"
    )
    loss_scale_window: PositiveCount = Field(default=1000, description="good steps before the scale doubles")
    hysteresis: PositiveCount = Field(default=2, description="overflows before the scale is halved")
    consecutive_hysteresis: bool = Field(default=False, description="refill the hysteresis at every good step")
    min_loss_scale: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="the dynamic scale never falls below"
    )


class Bf16Config(Block):
    """Training in bf16 with exact fp32 masters."""

    enabled: bool = Field(default=False, description="compute in bf16")
    immediate_grad_update: bool = hint(True, "gradients are always accumulated as they arrive")
    check_grad_overflow: bool = Field(default=False, description="skip a step whose gradient is not finite")


class DataTypesConfig(Block):
    """Number formats of what is kept between micro-batches."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="accumulated gradients; null: fp32, or the compute dtype without accumulation",
    )

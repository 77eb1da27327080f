"""Floating-point operations of one optimizer step."""

from dataclasses import dataclass

from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.workload import Workload

MODEL_FLOPS_FORMULA = "6 * active parameters + 12 * layers * query width * sequence, per token"
"""Forward 2 and backward 4 per parameter and token (embedding look-ups left out), and the two attention
products."""


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Operations of one rank-independent token stream."""

    model_per_token: float
    """What the mathematics needs (the numerator of MFU)."""
    hardware_per_token: float
    """What is executed: the recomputed forward pass added."""


def step_flops(model: ModelShape, load: Workload) -> StepFlops:
    """Operations per token; with frozen parameters their weight gradients (2 of 6) are left out."""
    embedding = (model.vocab + model.positions) * model.hidden
    matrices = model.active_params - embedding + (model.vocab * model.hidden if model.tied else 0)
    trainable_share = model.trainable_params / model.total_params if model.total_params else 0.0
    attention = 4 * model.layers * model.query_width * load.sequence
    forward = 2 * matrices + attention
    backward = 2 * matrices * (1 + trainable_share) + 2 * attention
    again = forward if load.checkpoint_interval else 0
    return StepFlops(model_per_token=forward + backward, hardware_per_token=forward + backward + again)

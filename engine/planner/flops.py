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
    """What is executed: the blocks' second forward pass added."""
    forward_per_token: float
    """The first forward pass."""

    @property
    def forward_share(self) -> float:
        """Of what is executed."""
        return self.forward_per_token / self.hardware_per_token


def step_flops(model: ModelShape, load: Workload) -> StepFlops:
    """Operations per token; with frozen parameters their weight gradients (2 of 6) are left out.

    Blocks are computed again as far as their backward pass needs it: up to the product by which they end, of which only the
    input is needed. The head is not in them.
    """
    embedding = (model.vocab + model.positions) * model.hidden
    matrices = model.active_params - embedding + (model.vocab * model.hidden if model.tied else 0)
    trainable_share = model.trainable_params / model.total_params if model.total_params else 0.0
    attention = 4 * model.layers * model.query_width * load.sequence
    forward = 2 * matrices + attention
    backward = 2 * matrices * (1 + trainable_share) + 2 * attention
    again = 0.0
    if load.checkpoint_interval:
        # Of several blocks between two inputs that are kept only the last one ends early.
        ends = model.layers / load.checkpoint_interval * model.hidden * model.ffn_width * max(model.experts_active, 1)
        again = max(forward - 2 * (ends + model.vocab * model.hidden), 0.0)
    return StepFlops(
        model_per_token=forward + backward, hardware_per_token=forward + backward + again, forward_per_token=forward
    )

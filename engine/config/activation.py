"""The block `activation_checkpointing`."""

from __future__ import annotations

from pydantic import Field

from lamina.engine.config.block import Block, hint
from lamina.engine.config.quantities import PositiveCount


class ActivationCheckpointingConfig(Block):
    """Recompute activations in the backward pass instead of keeping them."""

    partition_activations: bool = Field(default=False, description="keep a slice of each saved input per rank")
    cpu_checkpointing: bool = Field(default=False, description="keep saved inputs in host memory")
    number_checkpoints: PositiveCount | None = Field(
        default=None, description="checkpoints per forward; null: one per group"
    )
    contiguous_memory_optimization: bool = hint(False, "saved inputs lie in one arena already")
    synchronize_checkpoint_boundary: bool = hint(False, "no synchronisation is needed")
    profile: bool = hint(False, "engine.metrics() times the step")

"""The block `activation_checkpointing`."""

from __future__ import annotations

from pydantic import Field

from lamina.engine.config.block import Block, hint
from lamina.engine.config.quantities import PositiveCount


class ActivationCheckpointingConfig(Block):
    """How a model's own calls of checkpoint() are to keep inputs; ``tiers.activations`` recomputes blocks without any."""

    partition_activations: bool = hint(False, "there is no model parallelism over which saved inputs could be cut")
    cpu_checkpointing: bool = Field(
        default=False, description="compute blocks again in the backward pass, from inputs kept in host memory"
    )
    number_checkpoints: PositiveCount | None = hint(None, "inputs take the memory that they need")
    contiguous_memory_optimization: bool = hint(
        False, "it moves saved inputs between buffers; the results are the same"
    )
    synchronize_checkpoint_boundary: bool = hint(False, "no synchronisation is needed")
    profile: bool = hint(False, "engine.metrics() times the step")

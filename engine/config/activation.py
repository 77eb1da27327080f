"""The block `activation_checkpointing`."""

from __future__ import annotations

from pydantic import Field

from lamina.engine.config.block import Block, hint
from lamina.engine.config.quantities import PositiveCount


class ActivationCheckpointingConfig(Block):
    """Kept for configs that have it: which layers are recomputed is said in the model, with torch.utils.checkpoint."""

    partition_activations: bool = hint(False, "there is no model parallelism over which saved inputs could be cut")
    cpu_checkpointing: bool = Field(
        default=False, description="keep saved inputs in host memory; without a GPU they are there anyway"
    )
    number_checkpoints: PositiveCount | None = hint(None, "the model says which layers are recomputed")
    contiguous_memory_optimization: bool = hint(
        False, "it moves saved inputs between buffers; the results are the same"
    )
    synchronize_checkpoint_boundary: bool = hint(False, "no synchronisation is needed")
    profile: bool = hint(False, "engine.metrics() times the step")

"""Tensors over blocks of an arena. The tensor's storage keeps the block's bytes from being given out again."""

import torch

from lamina.tiers import Block
from lamina.tiers.memory.gpu import Accelerator


def tensor_over(
    block: Block, dtype: torch.dtype, numel: int, byte_offset: int = 0, *, device: Accelerator | None = None
) -> torch.Tensor:
    """A 1-d tensor of ``numel`` elements over the block's bytes from ``byte_offset`` on.

    ``device``: the accelerator in whose memory the block lies; None for host memory.
    """
    if device is not None:
        return device.tensor_over(block, dtype, numel, byte_offset)
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    return torch.frombuffer(block.view[byte_offset : byte_offset + nbytes], dtype=dtype)

"""Tensors over blocks of an arena. The tensor's storage keeps the block's bytes from being given out again."""

import torch

from lamina.tiers import Block


def tensor_over(block: Block, dtype: torch.dtype, numel: int, byte_offset: int = 0) -> torch.Tensor:
    """A 1-d tensor of ``numel`` elements over the block's bytes from ``byte_offset`` on."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    return torch.frombuffer(block.view[byte_offset : byte_offset + nbytes], dtype=dtype)

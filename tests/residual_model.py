"""A stack of equal linear layers with residual connections, for tests of where state lies: every block weighs the same."""

import torch
from torch import nn


class ResidualModel(nn.Module):
    """``blocks`` layers of ``width`` x ``width`` without biases; returns its loss."""

    def __init__(self, width: int, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def residual_model(width: int, blocks: int = 8) -> ResidualModel:
    """The same values every time."""
    torch.manual_seed(0)
    return ResidualModel(width, blocks)


def batch(number: int, width: int) -> torch.Tensor:
    """Four rows that the number decides."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(number))

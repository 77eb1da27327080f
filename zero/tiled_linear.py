"""A linear layer as a sequence of tiles, each a module that can be fetched and released on its own (memory-centric tiling)."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn


class TiledLinear(nn.Module):
    """``nn.Linear`` cut into ``out_splits`` × ``in_splits`` tiles: only one tile's weight need be in memory.

    With ``in_splits`` 1 every output element is the same dot product as in one layer; with more, partial sums are added
    tile by tile, so that results differ within rounding. Sizes need not divide: the first tiles are larger by one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= max(features, 1):
                raise ValueError(f"{name} is {splits}: it must be in 1..{features}, the number of features")
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes, self.out_sizes = _cut(in_features, in_splits), _cut(out_features, out_splits)
        self.tiles = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(columns, rows, bias=bias and number == 0, device=device, dtype=dtype)
                for number, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )

    @classmethod
    def of(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> "TiledLinear":
        """Tiles with the values of an ordinary layer."""
        tiled = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        tiled.load_whole(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        for parameter in tiled.parameters():
            parameter.requires_grad_(linear.weight.requires_grad)
        return tiled

    @torch.no_grad()
    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take values from a whole (out, in) weight and (out) bias. Raises ValueError for other shapes."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, want {(self.out_features, self.in_features)}")
        if (bias is None) != (self.rows()[0][0].bias is None):
            raise ValueError("bias: the layer and the values must both have one, or neither")
        for rows, row in zip(weight.split(self.out_sizes), self.rows(), strict=True):  # type: ignore[no-untyped-call]
            for values, tile in zip(rows.split(self.in_sizes, dim=1), row, strict=True):
                tile.weight.copy_(values)
        if bias is not None:
            for values, row in zip(bias.split(self.out_sizes), self.rows(), strict=True):  # type: ignore[no-untyped-call]
                row[0].bias.copy_(values)

    def rows(self) -> list[list[nn.Linear]]:
        """The tiles, row by row of the weight."""
        return [cast("list[nn.Linear]", list(row.children())) for row in self.tiles.children()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) to (…, out_features)."""
        parts = x.split(self.in_sizes, dim=-1) if len(self.in_sizes) > 1 else (x,)  # type: ignore[no-untyped-call]
        columns = []
        for row in self.rows():
            total = row[0](parts[0])
            for part, tile in zip(parts[1:], row[1:], strict=True):
                total = total + tile(part)
            columns.append(total)
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, {len(self.out_sizes)} x {len(self.in_sizes)} tiles, "
            f"bias={self.rows()[0][0].bias is not None}"
        )


def tile_linears(
    module: nn.Module, *, max_numel: int, choose: Callable[[str, nn.Linear], bool] | None = None
) -> list[str]:
    """Replace every ``nn.Linear`` whose weight has more than ``max_numel`` elements by tiles along its outputs; returns
    their names. A layer that shares its weight with another module stays as it is, as a tie cannot be kept; subclasses stay.

    ``choose``: which of them, by (name, layer). Call it before the optimizer or the engine is made.
    """
    if max_numel < 1:
        raise ValueError(f"max_numel is {max_numel}: it must be at least 1")
    uses: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    replaced: dict[int, TiledLinear] = {}
    names = []
    for owner_name, owner in list(module.named_modules()):
        for name, child in list(owner.named_children()):
            full_name = f"{owner_name}.{name}" if owner_name else name
            if type(child) is not nn.Linear or child.weight.numel() <= max_numel:
                continue
            if uses[id(child.weight)] > 1 or (choose is not None and not choose(full_name, child)):
                continue
            if id(child) not in replaced:
                rows = max(1, max_numel // child.in_features)
                splits = min(child.out_features, -(-child.out_features // rows))
                replaced[id(child)] = TiledLinear.of(child, out_splits=splits)
            setattr(owner, name, replaced[id(child)])
            names.append(full_name)
    return names


def _cut(features: int, splits: int) -> list[int]:
    """Sizes of the tiles: as equal as can be, larger ones first."""
    size, more = divmod(features, splits)
    return [size + (number < more) for number in range(splits)]

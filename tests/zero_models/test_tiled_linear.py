"""TiledLinear: the numbers of one layer, tile by tile, also in a window that the layer would not fit."""

from pathlib import Path

import pytest
import torch
from both_ways import differences, nvme, train_plain, train_tiered
from odd_models import WIDTH, Stack, tokens
from torch import nn

from lamina.tiers import PlacementError
from lamina.zero import TiledLinear, tile_linears

HIDDEN = 2048


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out_splits", "in_splits"), [(1, 1), (3, 1), (1, 4), (5, 3)])
def test_outputs_and_gradients_equal_one_layer(out_splits: int, in_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(22, 37, bias=bias).double()
    tiled = TiledLinear.of(linear, out_splits=out_splits, in_splits=in_splits)
    x = torch.randn(2, 3, 22, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    left, right = linear(x), tiled(y)
    torch.testing.assert_close(right, left, rtol=1e-12, atol=1e-12)
    left.sin().sum().backward()
    right.sin().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.tiles]
    torch.testing.assert_close(torch.cat(rows), linear.weight.grad, rtol=1e-12, atol=1e-12)
    assert sum(parameter.numel() for parameter in tiled.parameters()) == sum(p.numel() for p in linear.parameters())


def test_splits_and_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="out_splits is 9"):
        TiledLinear(4, 8, out_splits=9)
    with pytest.raises(ValueError, match="shape"):
        TiledLinear(4, 8, out_splits=2).load_whole(torch.zeros(4, 8), torch.zeros(8))
    with pytest.raises(ValueError, match="bias"):
        TiledLinear(4, 8, out_splits=2).load_whole(torch.zeros(8, 4), None)


class Wide(Stack):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return super().run(index, x) + self.down(self.up(x).tanh())


class Tiled(Wide):
    def __init__(self) -> None:
        super().__init__()
        assert tile_linears(self, max_numel=HIDDEN * WIDTH // 4) == ["up", "down"]


def test_a_layer_larger_than_the_window_trains_as_tiles(tmp_path: Path) -> None:
    window = HIDDEN * WIDTH * 4 // 2
    with pytest.raises(PlacementError, match=r"TiledLinear"):
        train_tiered(Wide, tokens, nvme(tmp_path, device_bytes=window))
    tiled = train_tiered(Tiled, tokens, nvme(tmp_path, device_bytes=window))
    assert list(differences(tiled, train_plain(Tiled, tokens))) == []
    torch.testing.assert_close(
        torch.tensor(tiled.losses), torch.tensor(train_plain(Wide, tokens).losses), rtol=1e-6, atol=0
    )


def test_tied_layers_are_left_whole() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "free": nn.Linear(4, 8)})
    module["head"].weight = module["embed"].weight
    assert tile_linears(module, max_numel=8) == ["free"]
    assert len(module["free"].tiles) == 4

"""The planner counts the very groups that the engine forms."""

import pytest
import torch

from lamina.engine.planner import Placement, model_preset, shape_from_module
from lamina.engine.planner.rank_slice import rank_slice
from lamina.tiers.placement.group_limits import HUGE_NUMEL
from lamina.zero.groups import grouping


def test_huge_blocks_are_cut_where_the_engine_cuts_them() -> None:
    model = model_preset("llama-70b")
    part = rank_slice(model, Placement(stage=3), 1)
    assert model.block_params > HUGE_NUMEL
    largest = model.params.largest_param
    assert all(largest <= numel < 2 * HUGE_NUMEL for numel in part.blocks)
    assert sum(part.groups) == model.total_params
    assert part.layers == model.layers


class Tables(torch.nn.Module):
    """Tables of tokens and positions, two blocks, a norm and an output matrix."""

    def __init__(self, vocab: int, positions: int, width: int, *, tied: bool) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, width), torch.nn.Embedding(positions, width)
        self.h = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(2))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("vocab", "positions", "width", "outside"),
    [
        (16384, 8192, 128, "tables, positions and norm"),
        (16384, 32, 128, "tables; the rest is tiny and joins"),
        (64, 64, 512, "all in the root group"),
        (16384, 16384, 64, "tables of the least size"),
        (16, 8, 16, "all tiny"),
    ],
)
def test_groups_are_those_that_the_engine_forms(
    vocab: int, positions: int, width: int, outside: str, tied: bool
) -> None:
    with torch.device("meta"):
        module = Tables(vocab, positions, width, tied=tied)
    part = rank_slice(shape_from_module(module, name="m", heads=1), Placement(stage=3), 1)
    groups = grouping.find_groups(module)
    root = sum(group.numel for group in groups if group.name == grouping.ROOT)
    assert part.groups[0] == root, outside
    assert sorted(part.groups[1:]) == sorted(group.numel for group in groups if group.name != grouping.ROOT)
    assert part.trainable == part.groups
    blocks = [group.numel for group in groups if group.name.startswith("h.")]
    assert list(part.blocks) == blocks


def test_the_shape_alone_gives_the_groups_of_its_tensors() -> None:
    counted = rank_slice(model_preset("gpt2"), Placement(stage=3), 1)
    assert counted.groups[1] == 50257 * 768, "the table of tokens is a group of its own"
    assert counted.groups[0] == 1024 * 768 + 2 * 768, "positions and the last norm"
    llama = rank_slice(model_preset("llama-7b"), Placement(stage=3), 1)
    assert llama.groups[0] == 0, "the last norm is tiny and joins the last block"
    assert llama.groups[1:3] == (32000 * 4096, 32000 * 4096)
    assert llama.blocks[-1] == llama.blocks[0] + 4096

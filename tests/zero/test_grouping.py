"""Param groups: every parameter in exactly one, blocks apart, tiny ones joined, huge ones split."""

import pytest
import torch
from torch import nn

from lamina.zero.groups.grouping import Grouping, GroupLimits, LeafModules, find_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 100, bias=False)


def names(model: nn.Module, **options: int) -> dict[str, list[str]]:
    return {group.name: [name for name, _ in group.parameters] for group in find_groups(model, **options)}


def test_blocks_are_groups_and_the_rest_is_the_root_group() -> None:
    groups = names(Model(), tiny_numel=1)
    assert list(groups) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert groups["(root)"] == ["embed.weight", "head.weight"]
    assert groups["blocks.1"] == [
        f"blocks.1.{part}.{kind}" for part in ("first", "second") for kind in ("weight", "bias")
    ]


def test_a_tied_weight_is_in_one_group_only() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    groups = find_groups(model, tiny_numel=1)
    everything = [id(parameter) for group in groups for _, parameter in group.parameters]
    assert len(everything) == len(set(everything)) == len(list(model.parameters()))


def test_large_modules_outside_the_blocks_are_groups_of_their_own() -> None:
    groups = names(Model(), tiny_numel=1, large_numel=6400)
    assert groups["embed"] == ["embed.weight"]
    assert groups["head"] == ["head.weight"]


def test_tiny_neighbours_are_joined() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert [len(members) for members in names(model, tiny_numel=1 << 14).values()] == [12]
    assert [len(members) for members in names(model, tiny_numel=1).values()] == [2] * 6


def test_very_many_tiny_modules_give_groups_of_about_the_limit() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1500)))  # 72 elements each
    groups = find_groups(model, tiny_numel=1 << 14)
    assert sum(len(group.parameters) for group in groups) == 3000
    assert all(1 << 14 <= group.numel <= 2 << 14 for group in groups[:-1])
    assert 3 <= len(groups) <= 7


def test_a_large_group_takes_in_a_tiny_neighbour_but_not_many() -> None:
    sizes = [(100, 100), (1, 8), (1, 8), (100, 100), (1, 8)]
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    assert [[name for name, _ in group.parameters] for group in find_groups(model, tiny_numel=12)] == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight", "4.weight"],
    ]


def test_huge_blocks_are_split_along_their_children() -> None:
    groups = names(Model(), tiny_numel=1, huge_numel=5000)
    assert "blocks.0.first" in groups
    assert "blocks.0.second" in groups


def test_every_parameter_of_a_mixed_module_is_found_once() -> None:
    model = Model()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    model.register_parameter("empty", nn.Parameter(torch.ones(0, 8)))
    grouped = [name for group in find_groups(model) for name, _ in group.parameters]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())


def test_finer_limits_end_with_a_group_for_every_module_with_parameters() -> None:
    finest = list(GroupLimits().finer())[-1]
    groups = names(Model(), **vars(finest))
    assert list(groups) == ["embed", *(f"blocks.{i}.{part}" for i in range(3) for part in ("first", "second")), "head"]


def test_blocks_can_be_chosen_by_class_name() -> None:
    model = nn.ModuleDict({"a": Block(8), "b": Block(8), "rest": nn.Linear(8, 8)})
    chooser = Grouping(block_classes=("Block",)).chooser(model)
    assert [group.name for group in find_groups(model, is_block=chooser, tiny_numel=1)] == ["a", "b", "(root)"]
    with pytest.raises(ValueError, match="no module is a Blok"):
        Grouping(block_classes=("Blok",)).chooser(model)


@pytest.mark.parametrize(
    "leaves",
    [
        LeafModules(classes=("Block",)),
        LeafModules(classes=(f"{Block.__module__}.Block",)),
        LeafModules(names=("blocks.0", "blocks.1", "blocks.2")),
        LeafModules(name_suffixes=("0", "1", "2")),
    ],
)
def test_leaf_modules_stay_whole_at_the_finest_limits(leaves: LeafModules) -> None:
    model = Model()
    leaves.require_present(model)
    finest = list(GroupLimits().finer())[-1]
    groups = find_groups(model, leaves=leaves, **vars(finest))
    assert [group.name for group in groups] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_leaf_outside_the_blocks_is_a_group_and_the_automatic_rule_goes_on() -> None:
    model = Model()
    model.experts = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    groups = names(model, tiny_numel=1, leaves=LeafModules(names=("experts",)))
    assert list(groups) == ["(root)", "blocks.0", "blocks.1", "blocks.2", "experts"]


@pytest.mark.parametrize(
    ("kind", "known"), [("classes", "it has Block"), ("names", "named_modules"), ("name_suffixes", "dot")]
)
def test_a_leaf_that_is_not_there_is_refused_by_name(kind: str, known: str) -> None:
    with pytest.raises(ValueError, match=rf"leaf_module\.{kind}: no module of the model is 'Blok': .*{known}"):
        LeafModules(**{kind: ("Blok",)}).require_present(Model())

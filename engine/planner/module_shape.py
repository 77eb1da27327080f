"""Model shapes from torch modules, also on the meta device: counted in the groups that the engine forms of them."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from lamina.engine.planner.formed_groups import FormedGroups
from lamina.engine.planner.hf_config import usual_shape
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.tensor_names import shape_from_tensors
from lamina.tiers.placement.group_limits import GroupLimits

if TYPE_CHECKING:
    from torch import nn


def shape_from_module(module: "nn.Module", *, name: str, heads: int | None = None) -> ModelShape:
    """The shape of a torch module; nothing is read but names, shapes and ``requires_grad``.

    A Hugging Face module's own config tells heads and experts, where it names them as usual. Raises PlanError when no blocks or
    no embedding can be found.
    """
    # Whoever has a module has torch; the planner does without.
    from lamina.zero.groups.grouping import find_blocks

    tensors, trainable = {}, 0
    for key, parameter in module.named_parameters():
        tensors[key] = tuple(int(n) for n in parameter.shape)
        trainable += prod(tensors[key]) if parameter.requires_grad else 0
    blocks = find_blocks(module)
    block_of = {id(parameter): inner for inner, block in reversed(blocks) for parameter in block.parameters()}
    config = getattr(module, "config", None)
    known = None
    if config is not None and hasattr(config, "to_dict"):
        known = usual_shape(config.to_dict(), name=name, source=f"{name}.config")
    return shape_from_tensors(
        tensors,
        name=name,
        heads=heads,
        trainable=None if trainable == sum(map(prod, tensors.values())) else trainable,
        config=known,
        block_of={key: block_of.get(id(parameter)) for key, parameter in module.named_parameters()},
        formed=formed_groups(module, [inner for inner, _ in blocks]),
    )


def formed_groups(module: "nn.Module", blocks: Sequence[str]) -> FormedGroups:
    """The groups that the engine forms of a module with its usual limits; ``blocks`` are the names of the outermost ones."""
    from lamina.zero.groups.group_use import used_in_order, used_together
    from lamina.zero.groups.grouping import ROOT, find_groups

    limits = GroupLimits().for_model(sum(parameter.numel() for parameter in module.parameters()))
    specs = find_groups(module, **vars(limits))
    inside = [any(spec.name == block or spec.name.startswith(f"{block}.") for block in blocks) for spec in specs]
    root = [at for at, spec in enumerate(specs) if spec.name == ROOT]
    tables = [at for at, spec in enumerate(specs) if spec.name != ROOT and not inside[at]]
    ordered = [*root, *tables, *(at for at, is_block in enumerate(inside) if is_block)]
    before = 0 if root else 1  # a root group of nothing
    place = {at: index + before for index, at in enumerate(ordered)}
    members = [[], *[specs[at].parameters for at in ordered]][1 - before :]
    return FormedGroups(
        numels=tuple(sum(parameter.numel() for _, parameter in group) for group in members),
        trainable=tuple(sum(p.numel() for _, p in group if p.requires_grad) for group in members),
        num_outside=1 + len(tables),
        order=tuple(place[at] for at in used_in_order(module, specs)),
        together=tuple(tuple(sorted(place[at] for at in used)) for used in used_together(module, specs)),
    )

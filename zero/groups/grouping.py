"""Finds the param groups of a module: parameters that are gathered and released together.

Blocks (the children of the outermost ModuleList or Sequential) are groups of their own, and so is any other module whose
own parameters are large; all that is left is the root group. Huge blocks are split along their children, tiny
neighbours are joined. Where the budgets do not hold such groups, finer ones are tried: see GroupLimits.finer.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lamina.tiers.placement.group_limits import HUGE_NUMEL, LARGE_NUMEL, TINY_NUMEL, GroupLimits, join_tiny

ROOT = "(root)"  # name of the group of everything that is in no other


@dataclass(frozen=True, kw_only=True)
class LeafModules:
    """Modules that are blocks wherever they are and are never split: by class name (bare, or with its module's path), by
    module name, or by the end of the module name."""

    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    name_suffixes: Sequence[str] = ()

    def includes(self, name: str, module: nn.Module) -> bool:
        kind = type(module)
        return (
            kind.__name__ in self.classes
            or f"{kind.__module__}.{kind.__qualname__}" in self.classes
            or name in self.names
            or any(name == suffix or name.endswith(f".{suffix}") for suffix in self.name_suffixes)
        )

    def require_present(self, module: nn.Module) -> None:
        """Raises ValueError, naming it, for an entry that no module of the model answers to."""
        for kind, entries in vars(self).items():
            for entry in entries:
                alone = LeafModules(**{kind: (entry,)})
                if not any(alone.includes(name, part) for name, part in module.named_modules()):
                    raise ValueError(
                        f"zero_optimization.leaf_module.{kind}: no module of the model is {entry!r}: "
                        f"{self._known(kind, module)}"
                    )

    @staticmethod
    def _known(kind: str, module: nn.Module) -> str:
        if kind == "classes":
            return f"it has {', '.join(sorted({type(part).__name__ for part in module.modules()}))}"
        return "write a name as model.named_modules() gives it, or the end of one from a dot on"


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """How groups are found: by the automatic rule, or blocks by class name (unqualified), or by a function of (name, module);
    with any of these, ``leaves`` are blocks too."""

    limits: GroupLimits = field(default_factory=GroupLimits)
    block_classes: Sequence[str] = ()
    is_block: Callable[[str, nn.Module], bool] | None = None
    leaves: LeafModules = field(default_factory=LeafModules)

    @property
    def automatic(self) -> bool:
        return not self.block_classes and self.is_block is None

    def chooser(self, module: nn.Module) -> Callable[[str, nn.Module], bool] | None:
        """The function that tells blocks; None for the automatic rule. Raises ValueError for a class that is not there."""
        if not self.block_classes:
            return self.is_block
        wanted = set(self.block_classes)
        found = {type(part).__name__ for part in module.modules()}
        if wanted - found:
            raise ValueError(
                f"no module is a {', '.join(sorted(wanted - found))}: the model has {', '.join(sorted(found))}"
            )
        also = self.is_block
        return lambda name, part: type(part).__name__ in wanted or (also is not None and also(name, part))


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group's name and its parameters with their qualified names, in module order; each parameter is in one group."""

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


def find_groups(
    module: nn.Module,
    *,
    tiny_numel: int = TINY_NUMEL,
    large_numel: int = LARGE_NUMEL,
    huge_numel: int = HUGE_NUMEL,
    is_block: Callable[[str, nn.Module], bool] | None = None,
    leaves: LeafModules | None = None,
) -> list[GroupSpec]:
    """Groups in module order; ``is_block`` chooses blocks by (name, module) instead of the automatic rule."""
    owner_of: dict[int, str] = {}
    names: dict[int, str] = {}
    parameters: dict[int, nn.Parameter] = {}
    blocks = list(_blocks(module, is_block, huge_numel, leaves or LeafModules()))
    for block_name, block in blocks:
        for name, parameter in block.named_parameters(prefix=block_name):
            owner_of.setdefault(id(parameter), block_name)
            names.setdefault(id(parameter), name)
            parameters[id(parameter)] = parameter
    for module_name, part in module.named_modules():
        own = [(name, parameter) for name, parameter in part.named_parameters(prefix=module_name, recurse=False)]
        fresh = [(name, parameter) for name, parameter in own if id(parameter) not in owner_of]
        large = sum(parameter.numel() for _, parameter in fresh) >= large_numel
        for name, parameter in fresh:
            owner_of[id(parameter)] = module_name if large else ""
            names[id(parameter)] = name
            parameters[id(parameter)] = parameter
    # Group order is module order of the first parameter; the root group comes first: embeddings are used first.
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for _, parameter in module.named_parameters():
        owner = owner_of[id(parameter)]
        members.setdefault(owner, []).append((names[id(parameter)], parameter))
    groups = [GroupSpec(name=owner or ROOT, parameters=tuple(listed)) for owner, listed in members.items()]
    return _join_tiny(groups, tiny_numel)


def _blocks(
    module: nn.Module, is_block: Callable[[str, nn.Module], bool] | None, huge_numel: int, leaves: LeafModules
) -> Iterable[tuple[str, nn.Module]]:
    """Outermost blocks, huge ones replaced by the blocks (or children with parameters) inside them; leaves stay whole."""
    stack: list[tuple[str, nn.Module, bool]] = [("", module, False)]
    while stack:
        name, part, is_child_of_list = stack.pop()
        numel = sum(parameter.numel() for parameter in part.parameters())
        leaf = leaves.includes(name, part)
        chosen = leaf or (is_block(name, part) if is_block else is_child_of_list)
        if chosen and numel and name:
            if leaf or numel <= huge_numel or not any(True for _ in part.children()):
                yield name, part
                continue
            children_are_blocks = True
        else:
            children_are_blocks = not is_block and isinstance(part, nn.ModuleList | nn.Sequential)
        prefix = f"{name}." if name else ""
        stack += reversed([(prefix + n, child, children_are_blocks) for n, child in part.named_children()])


def find_blocks(
    module: nn.Module, is_block: Callable[[str, nn.Module], bool] | None = None
) -> list[tuple[str, nn.Module]]:
    """The outermost blocks that have a forward of their own and parameters, with their names, in module order."""
    found = []
    for name, block in _blocks(module, is_block, sys.maxsize, LeafModules()):
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            found += [(f"{name}.{inner}", part) for inner, part in find_blocks(block, is_block)]
        else:
            found.append((name, block))
    return found


def _join_tiny(groups: Sequence[GroupSpec], tiny_numel: int) -> list[GroupSpec]:
    """Neighbours that are joined; the larger of what there is and what comes gives the name."""
    joined = []
    for members in join_tiny([group.numel for group in groups], tiny_numel):
        whole = groups[members[0]]
        for group in (groups[index] for index in members[1:]):
            name = whole.name if whole.numel >= group.numel else group.name
            whole = GroupSpec(name=name, parameters=whole.parameters + group.parameters)
        joined.append(whole)
    return joined

"""The part of a model that one rank deals with: groups after tensor and pipeline splits, and its shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import groupby

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.formed_groups import FormedGroups
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.placement import Placement, data_parallel_ranks
from lamina.engine.planner.state_bytes import shard_numel
from lamina.tiers.placement.group_limits import HUGE_NUMEL, LARGE_NUMEL, GroupLimits, join_tiny


@dataclass(frozen=True, kw_only=True)
class RankSlice:
    """Elements of the groups of the fullest rank: the root group (what is left outside the blocks; 0 when that is nothing),
    large modules outside the blocks, the blocks."""

    groups: tuple[int, ...]
    trainable: tuple[int, ...]
    """Trainable elements of each group."""
    num_outside: int
    """Groups that are no blocks."""
    ranks: int
    """Data-parallel ranks that share each group."""
    layers: int
    """Blocks of this rank, one that is used several times as often."""
    order: tuple[int, ...]
    """Groups as a forward pass uses them: the root group twice where some of it lies before the blocks and some behind them."""
    together: tuple[tuple[int, ...], ...] = ()
    """Groups that are used at the same time: an output matrix that is the table of tokens, and its bias."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each group, how many others are used first before it."""
        first = {group: place for place, group in enumerate(dict.fromkeys(self.order))}
        return tuple(first.get(group, len(first)) for group in range(len(self.groups)))

    @cached_property
    def places_together(self) -> tuple[tuple[int, ...], ...]:
        """``together`` by the groups' places."""
        return tuple(tuple(self.places[group] for group in used) for used in self.together)

    @cached_property
    def numel(self) -> int:
        """Elements of all groups."""
        return sum(self.groups)

    @cached_property
    def trainable_numel(self) -> int:
        """Trainable elements of all groups."""
        return sum(self.trainable)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """This rank's elements of each group at stage 3."""
        return tuple(shard_numel(numel, self.ranks) for numel in self.groups)

    @cached_property
    def trainable_shards(self) -> tuple[int, ...]:
        """This rank's trainable elements of each group."""
        return tuple(shard_numel(numel, self.ranks) for numel in self.trainable)

    @cached_property
    def frozen_shards(self) -> tuple[int, ...]:
        """This rank's elements that the optimizer never touches."""
        return tuple(
            shard_numel(numel - moving, self.ranks) for numel, moving in zip(self.groups, self.trainable, strict=True)
        )

    @property
    def outside(self) -> int:
        """Elements of the groups that are no blocks."""
        return sum(self.groups[: self.num_outside])

    @property
    def blocks(self) -> tuple[int, ...]:
        """Elements of the groups that are."""
        return self.groups[self.num_outside :]

    @property
    def trainable_outside(self) -> int:
        """Trainable elements outside the blocks."""
        return sum(self.trainable[: self.num_outside])

    @property
    def trainable_blocks(self) -> tuple[int, ...]:
        """Trainable elements of each block."""
        return self.trainable[self.num_outside :]

    @property
    def largest_block(self) -> int:
        """Elements of the largest block, of the largest group where there is none."""
        return max(self.blocks, default=max(self.groups))


_KINDS = ("root", "table", "block")


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group while it is put together."""

    numel: int
    trainable: int
    kind: str
    """One of _KINDS."""

    def with_next(self, other: "_Group") -> "_Group":
        """Both as one; the larger one gives its kind, of equals the first."""
        kind = self.kind if self.numel >= other.numel else other.kind
        return _Group(numel=self.numel + other.numel, trainable=self.trainable + other.trainable, kind=kind)


def rank_slice(model: ModelShape, place: Placement, world: int) -> RankSlice:
    """The fullest rank of a model on ``world`` ranks. Raises PlanError when the split is impossible."""
    ranks = data_parallel_ranks(world, place)
    params = model.params
    if place.pipeline > len(params.blocks):
        raise PlanError(f"placement: pipeline {place.pipeline} exceeds the {len(params.blocks)} blocks of {model.name}")
    if place.tensor > model.heads:
        raise PlanError(f"placement: tensor {place.tensor} exceeds the {model.heads} heads of {model.name}")
    count = -(-len(params.blocks) // place.pipeline)
    layers = max(count, -(-model.layers // place.pipeline))  # a block may be used several times
    if params.formed is not None and place.model_parallel == 1 and model.lora is None:
        return _as_formed(params.formed, model, ranks=ranks, layers=layers)
    blocks = sorted(params.blocks, reverse=True)[:count] if place.pipeline > 1 else params.blocks
    before, after = params.before, params.after
    if place.pipeline > 1:
        # First and last stage are different ranks; a tied table lives on both.
        after = (*after, model.vocab * model.hidden) if model.tied else after
        before, after = ((), after) if sum(after) > sum(before) else (before, ())
    largest = -(-params.largest_param // place.tensor)
    pieces = [list(_pieces(-(-numel // place.tensor), largest)) for numel in blocks]
    adapters = None if model.lora is None else -(-model.lora_params // place.tensor)
    share = model.trainable_params / model.total_params
    in_blocks = [
        _Group(
            numel=numel,
            trainable=round(numel * share) if adapters is None else -(-adapters // len(cut)),
            kind="block",
        )
        for cut in pieces
        for numel in cut
    ]
    modules = [[-(-numel // place.tensor) for numel in side if numel] for side in (before, after)]
    sequence, uses = _in_order(modules[0], in_blocks, modules[1], share if adapters is None else 0.0)
    at_once: list[int] = []
    if model.tied and modules[0]:
        table = uses[modules[0].index(max(modules[0]))]  # of tokens: it is the head, too
        at_once = [table, uses[-1]] if model.head_bias else []
        uses += at_once or [table]
    limits = GroupLimits().for_model(sum(group.numel for group in sequence))
    members = join_tiny([group.numel for group in sequence], limits.tiny_numel)
    joined = [reduce(_Group.with_next, [sequence[index] for index in indices]) for indices in members]
    group_of = {index: at for at, indices in enumerate(members) for index in indices}
    roots, tables, own = ([at for at, group in enumerate(joined) if group.kind == kind] for kind in _KINDS)
    ordered = [*(roots or [len(joined)]), *tables, *own]
    groups = [*joined, _Group(numel=0, trainable=0, kind="root")]
    return RankSlice(
        groups=tuple(groups[at].numel for at in ordered),
        trainable=tuple(groups[at].trainable for at in ordered),
        num_outside=1 + len(tables),
        ranks=ranks,
        layers=layers,
        order=tuple(ordered.index(at) for at, _ in groupby(group_of[index] for index in uses)),
        together=(tuple(sorted({ordered.index(group_of[index]) for index in at_once})),) if at_once else (),
    )


def _as_formed(formed: FormedGroups, model: ModelShape, *, ranks: int, layers: int) -> RankSlice:
    """The groups that the engine forms; with a number of trainable parameters of the user's own, an equal part of each is."""
    trainable, trained = formed.trainable, sum(formed.trainable)
    if model.trainable_params != trained:
        share = model.trainable_params / model.total_params
        trainable = tuple(round(numel * share) for numel in formed.numels)
    return RankSlice(
        groups=formed.numels,
        trainable=trainable,
        num_outside=formed.num_outside,
        ranks=ranks,
        layers=layers,
        order=formed.order,
        together=formed.together,
    )


def _in_order(
    before: Sequence[int], blocks: Sequence[_Group], after: Sequence[int], share: float
) -> tuple[list[_Group], list[int]]:
    """Groups in execution order before tiny ones are joined, as lamina.zero.groups.grouping finds them: a large module outside
    the blocks is one of its own, all others together are the root group, at the place of the first of them. And the indices of
    those that a forward pass uses, in order."""
    rest = sum(numel for numel in (*before, *after) if numel < LARGE_NUMEL)
    found: list[_Group] = []
    uses: list[int] = []
    root: int | None = None
    for modules, then in ((before, blocks), (after, ())):
        for numel in modules:
            if numel >= LARGE_NUMEL:
                found.append(_Group(numel=numel, trainable=round(numel * share), kind="table"))
                uses.append(len(found) - 1)
                continue
            if root is None:
                root = len(found)
                found.append(_Group(numel=rest, trainable=round(rest * share), kind="root"))
            uses.append(root)
        uses += range(len(found), len(found) + len(then))
        found += then
    return found, uses


def _pieces(numel: int, largest: int) -> Iterator[int]:
    """A block as the engine fetches it: one above ``HUGE_NUMEL`` is cut along its children, but no tensor is."""
    count = max(numel // max(HUGE_NUMEL, largest), 1)
    for index in range(count):
        yield numel * (index + 1) // count - numel * index // count

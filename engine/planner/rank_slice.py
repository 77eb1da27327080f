"""The part of a model that one rank deals with: groups after tensor and pipeline splits, and its shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.placement import Placement, data_parallel_ranks
from lamina.engine.planner.state_bytes import shard_numel

HUGE_NUMEL = 1 << 28
"""Elements of a block above which the engine fetches its parts one by one (lamina.zero.grouping)."""


@dataclass(frozen=True, kw_only=True)
class RankSlice:
    """Elements of the groups of the fullest rank; the root group (embedding, head, last norm) comes first."""

    groups: tuple[int, ...]
    trainable: tuple[int, ...]
    """Trainable elements of each group."""
    ranks: int
    """Data-parallel ranks that share each group."""
    layers: int
    """Blocks of this rank."""

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
    def root(self) -> int:
        """Elements of the root group."""
        return self.groups[0]

    @property
    def largest_block(self) -> int:
        """Elements of the largest group after the root."""
        return max(self.groups[1:], default=self.groups[0])


def rank_slice(model: ModelShape, place: Placement, world: int) -> RankSlice:
    """The fullest rank of a model on ``world`` ranks. Raises PlanError when the split is impossible."""
    ranks = data_parallel_ranks(world, place)
    params = model.params
    if place.pipeline > len(params.blocks):
        raise PlanError(f"placement: pipeline {place.pipeline} exceeds the {len(params.blocks)} blocks of {model.name}")
    if place.tensor > model.heads:
        raise PlanError(f"placement: tensor {place.tensor} exceeds the {model.heads} heads of {model.name}")
    layers = -(-len(params.blocks) // place.pipeline)
    blocks = sorted(params.blocks, reverse=True)[:layers] if place.pipeline > 1 else params.blocks
    root = params.embedding + params.head
    if place.pipeline > 1:
        # First and last stage are different ranks; a tied table lives on both.
        head = params.head + (model.vocab * model.hidden if model.tied else 0)
        root = max(params.embedding, head)
    largest = -(-params.largest_param // place.tensor)
    pieces = [list(_pieces(-(-numel // place.tensor), largest)) for numel in blocks]
    groups = (-(-root // place.tensor), *(numel for cut in pieces for numel in cut))
    if model.lora is not None:
        adapters = -(-model.lora_params // place.tensor)
        trainable: tuple[int, ...] = (0, *(-(-adapters // len(cut)) for cut in pieces for _ in cut))
    elif model.trainable_params == model.total_params:
        trainable = groups
    else:
        share = model.trainable_params / model.total_params
        trainable = tuple(round(numel * share) for numel in groups)
    return RankSlice(groups=groups, trainable=trainable, ranks=ranks, layers=layers)


def _pieces(numel: int, largest: int) -> Iterator[int]:
    """A block as the engine fetches it: one above ``HUGE_NUMEL`` is cut along its children, but no tensor is."""
    count = max(numel // max(HUGE_NUMEL, largest), 1)
    for index in range(count):
        yield numel * (index + 1) // count - numel * index // count

"""Finds groups that the budgets can hold, and their homes: coarse groups where they fit, else finer ones."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lamina.tiers import (
    BandwidthModel,
    ComputeTimes,
    Placement,
    PlacementError,
    PlacementQuestion,
    Plane,
    SegmentSize,
)
from lamina.zero.groups.group_use import used_together
from lamina.zero.groups.grouping import find_groups
from lamina.zero.groups.param_group import ParamGroup
from lamina.zero.groups.segment import Segment
from lamina.zero.groups.segmenting import make_groups
from lamina.zero.options import ZeroOptions
from lamina.zero.ranks.collectives import Ranks

from .own_state import OwnState

MASTER_ITEMSIZE = 4


def fit_groups(
    module: nn.Module, options: ZeroOptions, ranks: Ranks, own_state: OwnState
) -> tuple[list[ParamGroup], PlacementQuestion, Placement]:
    """Groups, what decides their homes (but for links and times), and the homes that the budgets alone suggest.

    Coarse groups before finer ones, and both before those that only fit by the last resort of the placement. Raises
    PlacementError, with the least sum and the largest parameter, when no grouping fits the budgets."""
    chooser = options.grouping.chooser(module)
    options.grouping.leaves.require_present(module)
    refusals: list[PlacementError] = []
    last_resort: tuple[list[ParamGroup], PlacementQuestion, Placement] | None = None
    seen: set[tuple[tuple[str, int], ...]] = set()
    numel = sum(parameter.numel() for parameter in module.parameters())
    for limits in options.grouping.limits.for_model(numel).finer():
        specs = find_groups(module, is_block=chooser, leaves=options.grouping.leaves, **vars(limits))
        shape = tuple((spec.name, len(spec.parameters)) for spec in specs)
        if shape in seen:
            continue
        seen.add(shape)
        groups = make_groups(
            specs,
            compute_dtype=options.compute_dtype,
            trains=options.trains,
            stage=options.stage,
            ranks=ranks,
            device=options.accelerator,
            persistence_threshold=options.persistence_threshold,
            persistent_numel=options.persistent_numel,
        )
        for group in groups:
            for segment in group.segments:
                segment.client = options.client is not None
        question = PlacementQuestion(
            segments=tuple(
                segment_size(segment, options, ranks, own_state) for group in groups for segment in group.segments
            ),
            budgets=options.budgets,
            wishes=options.wishes,
            links=BandwidthModel([]),
            times=ComputeTimes(forward_s=(), backward_s=(), adam_elements_per_s=1.0),
            generations=options.generations,
            together=used_together(module, specs),
            micro_batches=options.micro_batches,
            lookahead=options.lookahead,
        )
        try:
            placement = question.place()
        except PlacementError as error:
            refusals.append(error)
        else:
            if not placement.last_resort:
                return groups, question, placement
            last_resort = last_resort or (groups, question, placement)
        if not options.grouping.automatic:
            break
    if last_resort is not None:
        return last_resort
    refusal = min(refusals, key=lambda error: sum(error.least.values()))
    told = f"{refusal}{_persistent(groups)}{_largest_parameter(groups)}"
    raise PlacementError(told, least=refusal.least) from refusal


def segment_size(segment: Segment, options: ZeroOptions, ranks: Ranks, own_state: OwnState) -> SegmentSize:
    """What the placement must know of a segment."""
    masters = [master for master in _masters(segment) if segment.trainable and own_state.trains(master[0])]
    gradient = options.grad_dtype or segment.dtype
    copied = gradient.itemsize != MASTER_ITEMSIZE
    return SegmentSize(
        name=segment.name,
        group=segment.group,
        full_numel=segment.layout.numel,
        shard_numel=segment.layout.shard_numel,
        param_itemsize=segment.dtype.itemsize,
        state_itemsizes=tuple(spec.itemsize for spec in segment.planes if spec.plane is not Plane.PARAM),
        grad_itemsize=gradient.itemsize if segment.trainable else 0,
        bucket_itemsize=segment.dtype.itemsize if ranks.world_size > 1 else 0,
        replicated=segment.replicated,
        persistent=segment.persistent,
        block=segment.block,
        own_state_bytes=sum(own_state.nbytes(parameter, shape) for parameter, shape in masters),
        own_gradient_bytes=sum(shape.numel() for _, shape in masters) * MASTER_ITEMSIZE * copied,
    )


def _masters(segment: Segment) -> Iterator[tuple[nn.Parameter, torch.Size]]:
    """Parameters of which this rank has a part, with the shape of what a client's optimizer sees of each."""
    layout = segment.layout
    if layout.world_size == 1:
        yield from ((p, torch.Size(slot.shape)) for p, slot in zip(segment.parameters, layout.slots, strict=True))
    else:
        yield from ((segment.parameters[i], torch.Size([b - a])) for i, a, b in layout.pieces(segment.rank))


def _persistent(groups: Sequence[ParamGroup]) -> str:
    """A sentence about what was asked to stay on the device tier."""
    nbytes = sum(s.nbytes for group in groups for s in group.segments if s.persistent)
    if not nbytes:
        return ""
    return (
        f". Of these, {nbytes:,} bytes are parameters that stay whole in device memory for their size "
        f"(zero_optimization.stage3_param_persistence_threshold) or their integers"
    )


def _largest_parameter(groups: Sequence[ParamGroup]) -> str:
    """A sentence about the parameter that needs the most, as a single one cannot be split."""
    sizes = [
        (slot.numel * segment.dtype.itemsize, slot)
        for group in groups
        for segment in group.segments
        for slot in segment.layout.slots
    ]
    if not sizes:
        return ""
    nbytes, slot = max(sizes, key=lambda pair: pair[0])
    return (
        f". The largest parameter is {slot.name} with {slot.numel:,} elements, {nbytes:,} bytes, which are fetched as a "
        f"whole (lamina.zero.TiledLinear splits a linear layer)"
    )

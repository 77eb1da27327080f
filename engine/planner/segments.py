"""The segments of a case as the tier layer sees them, so that its own arithmetic counts their bytes."""

from collections.abc import Collection, Iterator, Mapping

from lamina.engine.planner.placement import Placement
from lamina.engine.planner.rank_slice import RankSlice
from lamina.engine.planner.state_bytes import PARAM, TIERED, shard_numel
from lamina.engine.planner.workload import Workload
from lamina.tiers.placement.homes import SegmentSize

FP32 = 4


def segments_of(
    part: RankSlice, load: Workload, place: Placement, planes: Mapping[str, int], own_planes: Collection[str] = ()
) -> Iterator[SegmentSize]:
    """One segment for the trained and one for the frozen part of every group; a segment's group is its place in a forward pass.

    ``planes``: bytes of each plane per trainable parameter, ``own_planes``: which are tensors of torch's optimizer. At stage 0
    every rank keeps a layout of its own.
    """
    ranks = 1 if place.stage == 0 else part.ranks
    states = tuple(size for plane, size in planes.items() if plane not in (PARAM, *own_planes))
    own = sum(planes[plane] for plane in own_planes)
    copied = FP32 if load.optimizer not in TIERED and load.grad_bytes != FP32 else 0
    for group, (numel, trained) in enumerate(zip(part.groups, part.trainable, strict=True)):
        for kind, elements in (("trained", trained), ("frozen", numel - trained)):
            if not elements:
                continue
            moves = kind == "trained"
            shard = shard_numel(elements, ranks)
            yield SegmentSize(
                name=f"group {group} {kind}",
                group=part.places[group],
                full_numel=shard * ranks,
                shard_numel=shard,
                param_itemsize=load.itemsize,
                state_itemsizes=states if moves else (),
                grad_itemsize=load.grad_bytes if moves else 0,
                bucket_itemsize=load.itemsize if part.ranks > 1 else 0,
                replicated=place.stage < 3 or part.ranks == 1,
                block=group > 0,
                own_state_bytes=own * -(-elements // ranks) if moves else 0,
                own_gradient_bytes=copied * -(-elements // ranks) if moves else 0,
            )

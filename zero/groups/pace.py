"""How long the fetches of one rank's groups take, for the executor's timetable."""

from collections.abc import Sequence

from lamina.tiers import BandwidthModel, Block, Tier
from lamina.tiers.schedule.lookahead import EarlyUpdate, Pace

from .param_group import ParamGroup
from .segment import Segment


def fetch_pace(
    groups: Sequence[ParamGroup], links: BandwidthModel, early: Sequence[Segment], staging: Sequence[Block]
) -> Pace | None:
    """``early``: segments that are updated under the passes, through ``staging``. None where the disk was not measured."""
    read, up = [], []
    for group in groups:
        streamed = group.streamed
        read.append(sum(segment.shard_nbytes for segment in streamed if segment.param_tier is Tier.NVME))
        up.append(sum(segment.shard_nbytes for segment in streamed if segment.device is not None))
    moved = sum(spec.itemsize * segment.layout.shard_numel for segment in early for spec in segment.stored_planes)
    update = EarlyUpdate(
        read_bytes=moved,
        written_bytes=moved,
        buffer_bytes=sum(block.nbytes for block in staging) if early else 0,
    )
    return Pace.of(links, read, up, update)

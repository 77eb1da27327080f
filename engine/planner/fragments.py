"""What an allocator keeps beyond the bytes in use."""

import math
from collections.abc import Iterator, Sequence

from lamina.engine.planner.case import Case
from lamina.engine.planner.items import AUTOGRAD, TRAINED, Item, Kind, Phase
from lamina.engine.planner.placement import DEVICE

SMALL_TOKEN_BYTES = 512
SHARE_PER_DOUBLING = 0.6
MOST_DOUBLINGS = 3


def fragment_items(case: Case, items: Sequence[Item]) -> Iterator[Item]:
    """Holes between the tensors of a pass, on the device tier."""
    share, kinds, besides = case.machine.fragment_share, AUTOGRAD, ""
    if share and case.load.checkpoint_interval and case.machine.shared_memory:
        share = recomputing_share(case.load.tokens * case.load.itemsize, share)
        kinds, besides = AUTOGRAD - {Kind.CHECKPOINTS}, " without the checkpoints"
    passes = [item for item in items if (item.tier == DEVICE and item.kind in kinds) or item.kind is Kind.COPIES]
    most = max(sum(item.nbytes for item in passes if phase in item.phases) for phase in Phase)
    formula = f"{share:.0%} of the most that a pass and its collectives allocate{besides}"
    yield Item(tier=DEVICE, kind=Kind.FRAGMENTS, nbytes=int(most * share), phases=TRAINED, formula=formula)


def recomputing_share(token_bytes: int, share: float) -> float:
    """The share of the C library's heap where blocks are computed again: their tensors and the gradients of their parameters are
    made and freed in turn, and few find the hole of another.

    ``token_bytes``: tokens of a micro-batch x bytes of an element; the holes grow with it and not with the width. Measured in
    torch 2.13 on glibc 2.36, with 3 x 1024 and 8 x 512 blocks and states: none at 512, 0.35 to 0.8 at 1024, 0.9 to 2 at
    2048 (most between two runs of one configuration), 1.7 at 4096; larger ones were not measured and count as 4096.
    """
    doublings = math.log2(max(token_bytes, SMALL_TOKEN_BYTES) / SMALL_TOKEN_BYTES)
    return share + SHARE_PER_DOUBLING * min(doublings, MOST_DOUBLINGS)

"""The global norm of the accumulated gradients."""

import math
from collections.abc import Mapping, Sequence

from .collectives import Ranks
from .dtypes import KERNEL_DTYPE
from .gradient_plane import GradientPlane
from .gradients import Gradients
from .kernels import Kernels
from .segment import Segment


def partial_norms(kernels: Kernels, plane: GradientPlane) -> list[float]:
    """Sums of squares, one per parameter that has a gradient, each taken in blocks of fixed size."""
    return [
        kernels.squared_norm(
            last - first, src=plane.address + first * plane.dtype.itemsize, dtype=KERNEL_DTYPE[plane.dtype]
        )
        for first, last in plane.pieces()
    ]


def global_norm(
    segments: Sequence[Segment],
    gradients: Gradients,
    kernels: Kernels,
    ranks: Ranks,
    known: Mapping[int, Sequence[float]],
) -> float:
    """The root of all sums of squares, added exactly (fsum), so that it depends neither on tiers nor on sub-groups nor on
    the order of groups. ``known``: sums that were taken before, by the segment's id. Collective."""
    shared: list[float] = []
    whole: list[float] = []  # of segments that every rank has all of
    for segment in segments:
        plane = gradients[segment]
        partials = shared if segment.layout.world_size > 1 else whole
        taken = known.get(id(segment))
        partials += taken if taken is not None and not plane.edited else partial_norms(kernels, plane)
    return math.sqrt(ranks.sum(math.fsum(shared)) + math.fsum(whole))


def clip_factor(norm: float, clip_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor: max_norm / (norm + 1e-6), at most 1; 1 without a limit."""
    if clip_norm <= 0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))

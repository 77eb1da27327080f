"""The global norm of the accumulated gradients; see [Note: order of the norm] in norm_blocks.py."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from lamina.zero.adam.dtypes import KERNEL_DTYPE
from lamina.zero.adam.kernels import NORM_BLOCK, DType, Kernels
from lamina.zero.groups.segment import Segment
from lamina.zero.ranks.collectives import Ranks

from .norm_blocks import CutBlock, cut_blocks, whole_blocks
from .plane import GradientPlane
from .planes import Gradients

EXACT_TERMS = 12
"""Doubles that hold any sum of squares of fp32 exactly: their bits lie between 2^-298 and 2^308, and each takes 53 of them."""


@dataclass(frozen=True, kw_only=True)
class _Squares:
    """What one segment gives: sums of the blocks that this rank has alone; the cut blocks that count, on whichever ranks they
    lie, and this rank's parts of them, fp32."""

    blocks: "array[float]"
    cut: Sequence[CutBlock]
    parts: Sequence[torch.Tensor]


class GradientNorm:
    """Of the gradients of one window. ``take`` may be called early, for a segment whose gradient is final."""

    def __init__(self, segments: Sequence[Segment], gradients: Gradients, kernels: Kernels, ranks: Ranks) -> None:
        self._segments = segments
        self._gradients = gradients
        self._kernels = kernels
        self._ranks = ranks
        self._whole = {id(segment): list(whole_blocks(segment.layout, segment.rank)) for segment in segments}
        self._cut = {id(segment): cut_blocks(segment.layout) for segment in segments}
        self._taken: dict[int, _Squares] = {}

    def take(self, segment: Segment) -> None:
        """Sum the squares of a segment's gradient, which may then be given up; again if it is edited. Not collective."""
        self._taken[id(segment)] = self._squares(self._gradients[segment])

    def forget(self) -> None:
        """Begin a new window."""
        self._taken.clear()

    def value(self) -> float:
        """The norm, the same on all ranks. Collective."""
        alike, shared = array("d"), array("d")  # of segments that every rank has all of, and that are shared out
        cut: list[CutBlock] = []
        parts: list[torch.Tensor] = []
        for segment in self._segments:
            plane = self._gradients[segment]
            squares = self._taken.get(id(segment))
            if squares is None or plane.edited:
                squares = self._squares(plane)
            (shared if segment.layout.world_size > 1 else alike).extend(squares.blocks)
            cut += squares.cut
            parts += squares.parts
        if cut:
            shared.extend(self._sums_of_cut(cut, parts))
        terms = self._ranks.gather_numbers(exact_terms(shared), "summing the gradient norm")
        return math.sqrt(math.fsum(chain(alike, *terms)))

    def _squares(self, plane: GradientPlane) -> _Squares:
        segment = plane.segment
        sums = array("d")
        for slot, first, last in self._whole[id(segment)]:
            if slot in plane.arrived:
                at = plane.address + first * plane.dtype.itemsize
                sums.extend(self._kernels.squared_norm(last - first, src=at, dtype=KERNEL_DTYPE[plane.dtype]))
        cut = [block for block in self._cut[id(segment)] if block.slot in plane.arrived]
        parts = []
        for begin, end in (block.part(segment.rank) for block in cut if segment.rank in block.ranks):
            flat = plane.flat
            if flat is None:
                raise RuntimeError(f"{segment.name} has no gradient in memory")
            plane.settle()
            parts.append(flat[begin:end].to(torch.float32, copy=True))
        return _Squares(blocks=sums, cut=cut, parts=parts)

    def _sums_of_cut(self, cut: Sequence[CutBlock], parts: Sequence[torch.Tensor]) -> "array[float]":
        """The sums of the cut blocks that this rank owns, once it has the others' parts. Collective."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        sent: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        received: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        # Zeros behind a short block add nothing to its sum.
        blocks = torch.zeros(sum(block.owner == rank for block in cut), NORM_BLOCK)
        rows, own_parts = iter(blocks), iter(parts)
        for block in cut:
            if block.owner == rank:
                row, own_part = next(rows), next(own_parts)
                row[: len(own_part)] = own_part
                for other in block.ranks[1:]:
                    begin, end = block.part(other)
                    where = other * block.shard_numel + begin - block.begin
                    received[other].append(row[where : where + end - begin])
            elif rank in block.ranks:
                sent[block.owner].append(next(own_parts))
        self._ranks.exchange(sent, received, "summing the gradient norm")
        return self._kernels.squared_norm(blocks.numel(), src=blocks.data_ptr(), dtype=DType.FP32)


def exact_terms(sums: Iterable[float]) -> list[float]:
    """EXACT_TERMS doubles whose exact sum is that of sums of squares: the sum rounded, what that leaves rounded, and so on."""
    rest, terms = list(sums), [0.0] * EXACT_TERMS
    for index in range(EXACT_TERMS):
        term = math.fsum(rest)
        terms[index] = term
        if term == 0.0 or not math.isfinite(term):
            break
        rest.append(-term)
    return terms


def clip_factor(norm: float, clip_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor: max_norm / (norm + 1e-6), at most 1; 1 without a limit."""
    if clip_norm <= 0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))

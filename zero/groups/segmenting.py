"""From group specs to groups of segments: one segment per dtype, trained and frozen parameters apart."""

from collections.abc import Sequence

import torch
from torch import nn

from lamina.tiers.memory.gpu import Accelerator
from lamina.zero.adam.dtypes import STATE_PLANES
from lamina.zero.ranks.collectives import Ranks

from .grouping import ROOT, GroupSpec
from .param_group import ParamGroup
from .partition import FlatLayout
from .segment import Segment


def make_groups(
    specs: Sequence[GroupSpec],
    *,
    compute_dtype: torch.dtype | None,
    trains: bool,
    stage: int,
    ranks: Ranks,
    device: Accelerator | None,
    persistence_threshold: int = 0,
    persistent_numel: int = 2**63 - 1,
) -> list[ParamGroup]:
    """Raises TypeError, naming them, for parameters whose dtype cannot be trained.

    Parameters of up to ``persistence_threshold`` elements stay whole in memory, in order as long as they are no more than
    ``persistent_numel`` elements in all, and so do those of integers, for whose absence no placeholder can stand (there is
    no NaN among them).
    """
    if trains:
        _refuse_unsupported(specs)
    groups = []
    for index, spec in enumerate(specs):
        kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in spec.parameters:
            dtype = compute_dtype if compute_dtype and parameter.is_floating_point() else parameter.dtype
            has_nan = dtype.is_floating_point or dtype.is_complex
            small = 0 < parameter.numel() <= min(persistence_threshold, persistent_numel)
            persistent_numel -= parameter.numel() if small else 0
            persistent = small or not has_nan
            kinds.setdefault((dtype, parameter.requires_grad and trains, persistent), []).append((name, parameter))
        segments = [
            _segment(
                spec,
                index,
                dtype,
                trainable,
                members,
                alone=len(kinds) == 1,
                stage=stage,
                ranks=ranks,
                device=device,
                persistent=persistent,
            )
            for (dtype, trainable, persistent), members in kinds.items()
        ]
        groups.append(ParamGroup(name=spec.name, index=index, segments=segments, ranks=ranks))
    return groups


def _segment(
    spec: GroupSpec,
    group: int,
    dtype: torch.dtype,
    trainable: bool,
    members: Sequence[tuple[str, nn.Parameter]],
    *,
    alone: bool,
    stage: int,
    ranks: Ranks,
    device: Accelerator | None,
    persistent: bool,
) -> Segment:
    traits = [str(dtype).removeprefix("torch."), *["frozen"] * (not trainable), *["persistent"] * persistent]
    kind = "" if alone else f" [{', '.join(traits)}]"
    # Stage 0 shares nothing out: every rank keeps a layout of its own.
    world_size = 1 if stage == 0 else ranks.world_size
    return Segment(
        name=f"{spec.name}{kind}",
        group=group,
        layout=FlatLayout.of([(name, tuple(parameter.shape)) for name, parameter in members], world_size),
        parameters=[parameter for _, parameter in members],
        dtype=dtype,
        trainable=trainable,
        device=device,
        rank=0 if stage == 0 else ranks.rank,
        block=spec.name != ROOT,
        replicated=persistent or stage < 3 or ranks.world_size == 1,
        persistent=persistent,
    )


def _refuse_unsupported(specs: Sequence[GroupSpec]) -> None:
    bad = [
        f"{name} is {str(parameter.dtype).removeprefix('torch.')}"
        for spec in specs
        for name, parameter in spec.parameters
        if parameter.requires_grad and parameter.dtype not in STATE_PLANES
    ]
    if bad:
        raise TypeError(
            f"parameters of these dtypes cannot be trained: {', '.join(bad)}. "
            f"Wanted: float32, bfloat16 or float16 (split a complex parameter into its real and imaginary part)"
        )

"""Puts the pieces together for one module on one rank: groups, placement, arenas, store, executor, updater, hooks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lamina.aio_native import AsyncIO
from lamina.tiers import (
    Arena,
    Block,
    Budgets,
    Executor,
    GenerationStore,
    Home,
    NvmePath,
    Plane,
    SegmentSize,
    Spans,
    Tier,
    Wishes,
    place,
)

from .access import claim, disclaim
from .dtypes import STATE_PLANES
from .gradients import GradientPlane, Gradients
from .grouping import GroupSpec, find_groups
from .initial_state import InitialState
from .kernels import Kernels
from .optimizer import AdamDefaults, TieredAdam
from .param_group import ParamGroup
from .partition import FlatLayout
from .segment import Segment
from .state import ZeroState
from .update import Updater


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """What the engine decided from its config. Bytes are limits of this rank; None means as much as is needed."""

    compute_dtype: torch.dtype | None = None  # None: leave the model's own dtypes
    grad_dtype: torch.dtype | None = None  # None: the compute dtype
    trains: bool = True  # False: forward only, nothing but the parameters is kept
    budgets: Budgets = field(default_factory=Budgets)
    wishes: Wishes = field(default_factory=Wishes)
    nvme: Sequence[NvmePath] = ()
    job: str = "default"
    generations: int = 2
    verify: Literal["always", "resume", "off"] = "resume"
    keep_state: bool = False
    lookahead: int = 64
    clip_norm: float = 0.0
    adam: AdamDefaults = field(default_factory=AdamDefaults)
    num_threads: int | None = None
    open_io: Callable[[], AsyncIO] = AsyncIO


class ZeroRuntime:
    """Everything that lamina keeps for one module. ``close()`` restores nothing: the parameters stay unbound."""

    def __init__(self, module: nn.Module, params: Any, options: ZeroOptions, *, spans: Spans | None = None) -> None:
        self.module = module
        self.options = options
        self.spans = spans or Spans()
        self._closing = ExitStack()
        try:
            self._build(module, params)
        except BaseException:
            self._closing.close()
            raise

    # -- construction --------------------------------------------------------------------------------------------------

    def _build(self, module: nn.Module, params: Any) -> None:
        options = self.options
        specs = find_groups(module)
        if options.trains:
            _refuse_unsupported(specs)
        self.groups = _make_groups(specs, options.compute_dtype, trains=options.trains)
        self.segments = [segment for group in self.groups for segment in group.segments]
        self.placement = place(
            [self._size(segment) for segment in self.segments],
            options.budgets,
            options.wishes,
            generations=options.generations,
        )
        for segment in self.segments:
            self._settle(segment, self.placement.homes[segment.name])
        self.device = self._arena(Tier.DEVICE, options.budgets.device_bytes, self.placement.device_bytes)
        self.host = self._arena(Tier.HOST, options.budgets.host_bytes, self.placement.host_bytes)
        self.kernels = Kernels(options.num_threads)
        self._closing.callback(self.kernels.close)
        self.io: AsyncIO | None = None
        self.store = self._open_store()
        staging = self._staging()
        self._bring_home(module, staging)
        bound = {segment.flat.data_ptr(): segment for segment in self.segments if segment.flat is not None}
        for group in self.groups:
            group.store, group.bound = self.store, bound
        self.executor = Executor(arena=self.device, sources=self.groups, lookahead=options.lookahead, spans=self.spans)
        self._closing.callback(self.executor.close)
        self.gradients = Gradients(self.segments, self.host, self._grad_dtype)
        self.updater = Updater(
            kernels=self.kernels,
            store=self.store,
            staging=staging,
            sub_group_numel=self.placement.sub_group_numel,
            spans=self.spans,
        )
        self._closing.callback(self.updater.close)
        self.gradients.wait_for_room = self.updater.wait_for_a_job
        self.optimizer: TieredAdam | None = None
        if options.trains:
            self.optimizer = TieredAdam(
                params,
                options.adam,
                segments=self.segments,
                gradients=self.gradients,
                updater=self.updater,
                kernels=self.kernels,
                store=self.store,
                clip_norm=options.clip_norm,
                retain_gradients=options.wishes.retain_gradients,
            )
        self.early_segments = {id(s) for s in self.segments if s.trainable and self._may_update_early(s)}
        self._waiting: list[Segment] = []
        self.collecting = False  # True during the backward pass of the last micro-batch of a step
        self.state = ZeroState(
            module,
            self.groups,
            self.executor,
            self._take_gradient,
            bound=bound,
            watch_in_place=any(s.in_place for s in self.segments if id(s) in self.early_segments),
        )
        self._closing.callback(self.state.remove)
        claim(self)
        self._closing.callback(disclaim, self)

    def _size(self, segment: Segment) -> SegmentSize:
        return SegmentSize(
            name=segment.name,
            group=segment.group,
            full_numel=segment.layout.numel,
            shard_numel=segment.layout.shard_numel,
            param_itemsize=segment.dtype.itemsize,
            state_itemsizes=tuple(s.itemsize for s in segment.planes if s.plane is not Plane.PARAM),
            grad_itemsize=self._grad_dtype(segment).itemsize if segment.trainable else 0,
            block=segment.block,
        )

    def _settle(self, segment: Segment, home: Home) -> None:
        segment.param_tier, segment.state_tier = home.param, home.state
        in_place = (Tier.DEVICE, Tier.HOST) if self.options.wishes.host_in_place else (Tier.DEVICE,)
        segment.in_place = home.param in in_place

    def _arena(self, tier: Tier, budget: int | None, needed: int) -> Arena:
        arena = Arena(tier, needed if budget is None else budget)
        self._closing.callback(arena.close)
        return arena

    def _open_store(self) -> GenerationStore | None:
        shards = [segment.shard_spec() for segment in self.segments if segment.stored_planes]
        if not shards:
            return None
        options = self.options
        self.io = options.open_io()
        self._closing.callback(self.io.close)
        store = GenerationStore.open(
            options.nvme,
            job=options.job,
            rank=0,
            shards=shards,
            io=self.io,
            generations=options.generations,
            verify=options.verify,
        )
        self._closing.callback(lambda: store.close(remove=not options.keep_state))
        return store

    def _staging(self) -> list[Block]:
        count = self.placement.staging_count
        if count == 0:
            return []
        nbytes = self.placement.host_items["update buffers"] // count
        blocks = [self.host.alloc(nbytes, "update buffers") for _ in range(count)]
        for block in blocks:
            self._closing.callback(block.free)
        return blocks

    def _bring_home(self, module: nn.Module, staging: Sequence[Block]) -> None:
        chunk = self.placement.sub_group_numel
        block = staging[0] if staging else None
        if block is None and self.store is not None:  # only frozen segments are on NVMe
            block = self.device.alloc(min(self.device.nbytes, chunk * 4), "initial write")
            chunk = block.nbytes // 4
        InitialState(
            arenas={Tier.DEVICE: self.device, Tier.HOST: self.host},
            kernels=self.kernels,
            store=self.store,
            staging=block,
            chunk_numel=chunk,
        ).bring_home(self.segments)
        if block is not None and not staging:
            block.free()
        if self.options.compute_dtype is not None:
            for buffer_owner in module.modules():
                for name, buffer in buffer_owner.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        buffer_owner._buffers[name] = buffer.to(self.options.compute_dtype)

    def _grad_dtype(self, segment: Segment) -> torch.dtype:
        return self.options.grad_dtype or segment.dtype

    # -- early updates -----------------------------------------------------------------------------------------------

    def _may_update_early(self, segment: Segment) -> bool:
        return self.options.wishes.overlap_update and segment.state_tier is Tier.NVME

    def _take_gradient(self, segment: Segment, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient over, and start the update of what has become final."""
        plane = self.gradients[segment]
        if self.optimizer is not None and self.optimizer.started_early(segment):
            # More came after all parameters had theirs (a weight that is recomputed and used twice): start over.
            if not plane.present:
                raise RuntimeError(
                    f"{segment.layout.slots[index].name} got a second gradient in one backward pass, after its group was updated "
                    f"and its gradient given up. Write tiers.overlap_update: false"
                )
            plane.edited = True
            plane.add(index, gradient)
            return
        self.gradients.add(segment, index, gradient)
        if not self.collecting or id(segment) not in self.early_segments:
            return
        if plane.final:
            self._waiting.append(segment)
        self._start_final()

    def _start_final(self) -> None:
        """Start what is complete. Parameters in place must also not be held by the rest of the backward pass."""
        still_waiting = []
        for segment in self._waiting:
            if segment.in_place and self.state.saved[id(segment)]:
                still_waiting.append(segment)
            elif self.optimizer is not None:
                self.optimizer.start_early(segment)
        self._waiting = still_waiting

    def begin_backward(self, *, last_of_window: bool) -> None:
        self.collecting = last_of_window
        self.gradients.begin_backward()

    def end_backward(self) -> None:
        self.collecting = False
        self._waiting.clear()

    def forward_context(self) -> AbstractContextManager[None]:
        return self.state.forward()

    def gradient(self, segment: Segment) -> GradientPlane:
        return self.gradients[segment]

    def finish_step(self) -> None:
        """After the optimizer's step: the fetched copies are stale, the next step's first groups can be fetched."""
        self.executor.end_step()

    def close(self) -> None:
        """Wait for what is under way and give everything back, in reverse order of construction."""
        self._closing.close()


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


def _make_groups(specs: Sequence[GroupSpec], compute_dtype: torch.dtype | None, *, trains: bool) -> list[ParamGroup]:
    groups = []
    for index, spec in enumerate(specs):
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in spec.parameters:
            dtype = compute_dtype if compute_dtype and parameter.is_floating_point() else parameter.dtype
            kinds.setdefault((dtype, parameter.requires_grad and trains), []).append((name, parameter))
        segments = []
        for (dtype, trainable), members in kinds.items():
            suffix = (
                "" if len(kinds) == 1 else f" [{str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'}]"
            )
            segments.append(
                Segment(
                    name=f"{spec.name}{suffix}",
                    group=index,
                    layout=FlatLayout.of([(name, tuple(parameter.shape)) for name, parameter in members]),
                    parameters=[parameter for _, parameter in members],
                    dtype=dtype,
                    trainable=trainable,
                    block=spec.name != "(root)",
                )
            )
        groups.append(ParamGroup(name=spec.name, index=index, segments=segments))
    return groups

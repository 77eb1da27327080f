"""Puts the pieces together for one module on one rank, and leads them through the life of a step.

Read on in residence.py for where state lives and how it comes there, in early_updates.py for what is updated under the
backward pass, in migration.py for changes of homes while training.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina.aio_native import AsyncIO, IOStats
from lamina.tiers import Executor, Placement, Spans
from lamina.tiers.schedule.lookahead import Pace

from .access import claim, disclaim
from .gradients.bucket_room import BucketRoom
from .gradients.planes import Gradients
from .gradients.reducer import Reducer
from .groups.fetch_buffers import FetchBuffers
from .groups.grouping import find_blocks
from .groups.pace import fetch_pace
from .groups.segment import Segment
from .homes.choosing import Decision
from .homes.migration import Migration
from .homes.residence import Residence
from .options import ZeroOptions
from .passes.collector import GradientCollector
from .passes.hooks import ZeroState
from .passes.inputs_home import home_of_inputs
from .passes.recompute import Recomputer
from .passes.recomputed_blocks import RecomputedBlocks, has_running_statistics
from .ranks.collectives import Ranks
from .soundness import Soundness
from .step.ahead import AheadOfStep
from .step.client_optimizer import ClientOptimizer
from .step.early_updates import EarlyUpdates
from .step.optimizer import TieredAdam
from .step.update import Updater


class ZeroRuntime:
    """Everything that lamina keeps for one module. ``close()`` restores nothing: the parameters stay unbound."""

    def __init__(
        self,
        module: nn.Module,
        params: Any,
        options: ZeroOptions,
        *,
        ranks: Ranks | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.module = module
        self.options = options
        self.ranks = ranks or Ranks()
        self.spans = spans or Spans()
        self._in_backward = False
        self._may_be_ahead = False
        self._root_hook: RemovableHandle | None = None
        self._closing = ExitStack()
        self._closing.callback(self.ranks.close)
        try:
            self._build(params)
        except BaseException:
            self._closing.close()
            raise

    # -- construction --------------------------------------------------------------------------------------------------

    def _build(self, params: Any) -> None:
        """From the bottom up: homes, what moves state, what collects gradients and updates, the hooks on the module."""
        residence = self.residence = Residence(self.module, self.options, self.ranks, self._closing)
        self.groups, self.segments = residence.groups, residence.segments
        self.device, self.host, self.store = residence.device, residence.host, residence.store
        self.kernels, self.resumed = residence.kernels, residence.resumed
        # Addresses of bound parameters: the groups note where they put them, the hooks look them up.
        bound = {s.flat.data_ptr(): s for s in self.segments if s.flat is not None and s.nbytes}
        self._build_executor(bound)
        self._build_updater()
        self.early_updates = EarlyUpdates(residence)
        self.migration = Migration(self)
        self.optimizer: TieredAdam | ClientOptimizer | None = None
        self.collector: GradientCollector | None = None
        if self.options.trains:
            self.optimizer = self._client() or self._tiered_adam(params)
            self.optimizer.copies = self.executor
            self.collector = self._collector(self.optimizer)
        self.state = ZeroState(
            self.module,
            self.groups,
            self.executor,
            self.collector.take if self.collector is not None else None,
            bound=bound,
            watch_in_place=any(segment.in_place for segment in self.early_segments),
            between_operations=self.updater.turns.come_by if self._shares_cores else lambda: None,
        )
        self._closing.callback(self.state.remove)
        self.ahead = AheadOfStep(self.module, self._started_early)
        self._closing.callback(self.ahead.remove)
        self._watch_early()
        self._recompute_blocks()
        self.soundness = Soundness(self)
        claim(self)
        self._closing.callback(disclaim, self)

    def _build_executor(self, bound: dict[int, Segment]) -> None:
        count = self.placement.fetch_buffer_count
        fetch_buffers = FetchBuffers(blocks=self.residence.host_blocks("fetch buffers", count))
        for group in self.groups:
            group.store, group.bound, group.fetch_buffers = self.store, bound, fetch_buffers
        self.executor = Executor(
            arena=self.device,
            sources=self.groups,
            lookahead=self.options.lookahead,
            spans=self.spans,
            pace=self._pace,
        )
        self._closing.callback(self.executor.close)

    def _pace(self) -> Pace | None:
        # Ranks measure different times, but must fetch and evict alike: what one of them has kept it would not gather.
        if self.ranks.world_size > 1:
            return None
        return fetch_pace(self.groups, self.decision.links.model, self.early_segments, self.residence.staging)

    def _build_updater(self) -> None:
        """The streamed update, and the gradients that it uses."""
        options = self.options
        self.gradients = Gradients(self.segments, self.host, lambda segment: options.grad_dtype or segment.dtype)
        if self.placement.scratch_bytes and self.store is not None:
            scratch = self.store.scratch(self.placement.scratch_bytes)
            self._closing.callback(scratch.close)
            self.gradients.spill_to(scratch)
        self.updater = Updater(
            kernels=self.kernels,
            store=self.store,
            staging=self.residence.staging,
            sub_group_numel=self.placement.sub_group_numel,
            spans=self.spans,
        )
        self._closing.callback(self.updater.close)
        if self.ranks.world_size > 1:
            self.executor.settle_changes, self.executor.alike = self.updater.finish_jobs, True
        self.gradients.wait_for_room = self.updater.wait_for_a_job

    def _tiered_adam(self, params: Any) -> TieredAdam:
        optimizer = TieredAdam(
            params,
            self.options.adam,
            segments=self.segments,
            gradients=self.gradients,
            updater=self.updater,
            kernels=self.kernels,
            store=self.store,
            ranks=self.ranks,
            clip_norm=self.options.clip_norm,
            retain_gradients=self.options.wishes.retain_gradients,
        )
        optimizer.migration = self.migration
        return optimizer

    def _client(self) -> ClientOptimizer | None:
        if self.options.client is None:
            return None
        return ClientOptimizer(
            self.options.client,
            segments=self.segments,
            gradients=self.gradients,
            kernels=self.kernels,
            ranks=self.ranks,
            clip_norm=self.options.clip_norm,
        )

    def _collector(self, optimizer: TieredAdam | ClientOptimizer) -> GradientCollector:
        if not self.placement.scratch_bytes:
            self.gradients.reserve(self.early_updates.transient_gradients(self.placement.homes))
        reducer = None
        if self.ranks.world_size > 1:
            room = BucketRoom(self.executor, self.options, self._closing)
            reducer = Reducer(self.segments, self.gradients, self.ranks, room)
        return GradientCollector(
            self.gradients,
            optimizer,
            reducer,
            early=self.early_segments,
            still_used=lambda segment: self.state.saved[id(segment)] > 0,
            copy_in_use=lambda segment: any(
                self.state.saved[id(other)] for other in self.groups[segment.group].streamed
            ),
        )

    def _recompute_blocks(self) -> None:
        """Let the blocks be computed again in the backward pass, where that is wished; see recompute.py."""
        options = self.options
        self.recomputed: tuple[str, ...] = ()
        """Names of the blocks that are computed again in the backward pass."""
        self.saved_inputs = home_of_inputs(self.residence, self._closing)
        device = options.accelerator.device if options.accelerator is not None else None
        self.recomputer = Recomputer(self.state, self.saved_inputs, device)
        if options.recompute is not None:
            found = find_blocks(self.module, options.grouping.chooser(self.module))
            blocks = [(name, block) for name, block in found if not has_running_statistics(block)]
            self.recomputed = tuple(name for name, _ in blocks)
            self._closing.callback(RecomputedBlocks(blocks, self.recomputer).restore)

    @property
    def _shares_cores(self) -> bool:
        """Whether the passes compute where the update does; see [Note: Turns] in core_turns.py."""
        return self.options.accelerator is None

    # -- what may change while training ----------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where everything lives now."""
        return self.residence.placement

    @property
    def decision(self) -> Decision:
        """What the placement is the outcome of."""
        return self.residence.decision

    @property
    def io(self) -> AsyncIO | None:
        """This rank's way to its files; None where it has none."""
        return self.residence.io

    def io_stats(self) -> IOStats | None:
        """What it has done so far; None where there is none."""
        return self.io.stats() if self.io is not None else None

    @property
    def early_segments(self) -> list[Segment]:
        """Segments whose update may start under the backward pass."""
        return self.early_updates.segments

    def homes_changed(self) -> None:
        """Let everything that goes by homes take up the present ones. Between two steps."""
        for segment in self.segments:
            segment.late = self.placement.homes[segment.name].late
        self.early_updates.homes_changed()
        self.gradients.reserve(self.early_updates.transient_gradients(self.placement.homes))
        if self.collector is not None:
            self.collector.update_early(self.early_segments)
        self.executor.homes_changed()
        self.state.homes_changed(watch_in_place=any(segment.in_place for segment in self.early_segments))
        self._watch_early()

    def _watch_early(self) -> None:
        """Refuse the use of parameters once they are updated early: where that changes what compute uses, or ranks may differ."""
        several = self.ranks.world_size > 1
        self.ahead.watch([s for s in self.early_segments if several or s.updated_where_used])

    def _started_early(self, segment: Segment) -> bool:
        return self.optimizer is not None and self.optimizer.started_early(segment)

    # -- the life of a step --------------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around every forward and backward pass.

        Raises RuntimeError for a forward pass between ``backward()`` and ``step()`` when parameters that compute uses
        were already updated; on several ranks, which refuse alike, when they may have been.
        In a backward pass, what is run again with parameters that were already updated raises it; see ahead.py.
        """
        if not self._in_backward and self._may_be_ahead and self.optimizer is not None:
            several, started = self.ranks.world_size > 1, self.optimizer.started_early
            ahead = [s.name for s in self.early_segments if several or (s.updated_where_used and started(s))]
            if ahead:
                raise RuntimeError(
                    f"forward between backward() and step(): {', '.join(ahead[:3])}{', …' if len(ahead) > 3 else ''} already "
                    f"have the coming step's values. Call step() first, or write tiers.overlap_update: false"
                )
        with self.state.forward(), self.ahead.uses() if self._in_backward and self._may_be_ahead else nullcontext():
            try:
                yield
            except BaseException:
                self.executor.unpin_all()
                raise

    def begin_backward(self, *, last_of_window: bool, root: torch.Tensor | None = None) -> None:
        """``root``: what ``backward`` is going to be called on; without it updates do not start early."""
        collector = self.collector
        if collector is not None:
            collector.begin_backward(last_of_window=last_of_window and root is not None)
        self._in_backward = True
        if self._shares_cores:
            self.kernels.use_team()
        if collector is None:
            return
        self._may_be_ahead |= last_of_window and bool(self.early_segments)
        if root is not None:
            self._root_hook = root.register_hook(  # type: ignore[no-untyped-call]
                lambda _: collector.enter_pass()
            )

    def end_backward(self, *, succeeded: bool = True) -> None:
        self._in_backward = False
        self.updater.turns.leave()
        if self._root_hook is not None:
            self._root_hook.remove()
            self._root_hook = None
        if self.collector is None:
            return
        reduced = False
        try:
            if succeeded:
                self.collector.reduce_rest()
                reduced = True
        finally:
            self.collector.end_backward(succeeded=reduced)

    def take_own_backward(self) -> None:
        """Before a micro-batch is closed: what a ``backward()`` of the user's own has left is brought together over the ranks."""
        if self.collector is not None and self.ranks.world_size > 1:
            self.end_backward()
            self.collector.reduce_late()
        self.begin_backward(last_of_window=False)

    def close_window(self) -> None:
        """Before the optimizer's step."""
        if self.collector is not None:
            self.collector.close_window()

    def finish_step(self, *, applied: bool = True) -> None:
        """After the optimizer's step, or after it was skipped: the next step's first groups can be fetched."""
        self._may_be_ahead = False
        if applied:
            self.migration.after_commit()
        self.executor.end_step()

    def drop_window(self) -> bool:
        """Forget the gradients of this window and every update that was started early: nothing has happened. True where homes
        in memory may have been updated and are to be read again, on all ranks or none. Not within a pass."""
        self.executor.unpin_all()
        ahead, self._may_be_ahead = self._may_be_ahead, False
        if self.collector is not None:
            self.state.drop_gradients()
            self.collector.drop()
        return ahead

    def close(self) -> None:
        """Wait for what is under way and give everything back, in reverse order of construction."""
        self.ranks.leave()  # first: others may wait for this rank, and this one for them
        self._closing.close()

"""Puts the pieces together for one module on one rank: groups, placement, arenas, store, executor, updater, hooks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lamina.aio_native import AsyncIO
from lamina.tiers import (
    Arena,
    Block,
    BudgetError,
    Executor,
    GenerationStore,
    Home,
    PlacementError,
    Spans,
    StoreError,
    Tier,
)
from lamina.tiers.memory import check_budget, read_memory_limits
from lamina.tiers.nvme.unnamed import UnnamedFile

from .access import claim, disclaim
from .away import is_away
from .choosing import decide
from .client_optimizer import ClientOptimizer
from .collectives import Ranks
from .collector import GradientCollector
from .fetch_buffers import FetchBuffers
from .fitting import fit_groups
from .gradients import Gradients
from .grouping import find_blocks
from .initial_state import InitialState
from .kernels import Kernels
from .migration import Migration
from .optimizer import TieredAdam
from .options import ZeroOptions
from .recompute import Recomputer
from .recomputed_blocks import RecomputedBlocks, has_running_statistics
from .reducer import Reducer
from .saved_inputs import InputsAsTheyAre, InputsInFile, InputsInHost, Room, SavedInputs, arena_within
from .segment import Segment
from .state import ZeroState
from .update import Updater

INITIAL_WRITE_BYTES = 16 << 20  # a buffer for the time of initialisation, where there are no update buffers


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
        self._added: list[Arena] = []
        self.recomputed: tuple[str, ...] = ()
        """Names of the blocks that are computed again in the backward pass."""
        self._closing = ExitStack()
        self._closing.callback(self.ranks.close)
        try:
            self._build_state()
            self._build_movers(params)
        except BaseException:
            self._closing.close()
            raise

    # -- construction --------------------------------------------------------------------------------------------------

    def _build_state(self) -> None:
        """Groups, their homes, and the memory and files that these need; the parameters are brought home."""
        options = self.options
        self.groups, question, usual = fit_groups(self.module, options, self.ranks)
        self.decision = decide(question, usual, options, self.ranks)
        self.placement = self.decision.placement
        self.segments = [segment for group in self.groups for segment in group.segments]
        for segment in self.segments:
            segment.client = options.client is not None
        for segment in self.segments:
            self.settle_home(segment, self.placement.homes[segment.name])
        self._check_memory()
        self.device = self._arena(Tier.DEVICE, options.budgets.device_bytes, self.placement.device_bytes)
        self.host = self._arena(Tier.HOST, options.budgets.host_bytes, self.placement.host_bytes)
        if options.accelerator is not None:
            self._closing.enter_context(options.accelerator.page_locked(self.host))
        self.kernels = Kernels(options.num_threads)
        self._closing.callback(self.kernels.close)
        self.io: AsyncIO | None = None
        self.store = self._open_store()
        self.staging = self._update_buffers()
        self._bring_home()

    def _build_movers(self, params: Any) -> None:
        """What moves state while training: executor, updater, optimizer, collector and hooks."""
        options = self.options
        bound = {s.flat.data_ptr(): s for s in self.segments if s.flat is not None and s.nbytes}
        fetch_buffers = FetchBuffers(blocks=self._blocks("fetch buffers", self.placement.fetch_buffer_count))
        for group in self.groups:
            group.store, group.bound, group.fetch_buffers = self.store, bound, fetch_buffers
        self.executor = Executor(arena=self.device, sources=self.groups, lookahead=options.lookahead, spans=self.spans)
        self._closing.callback(self.executor.close)
        self.gradients = Gradients(self.segments, self.host, self._grad_dtype)
        if self.placement.scratch_bytes and self.store is not None:
            scratch = self.store.scratch(self.placement.scratch_bytes)
            self._closing.callback(scratch.close)
            self.gradients.spill_to(scratch)
        self.updater = Updater(
            kernels=self.kernels,
            store=self.store,
            staging=self.staging,
            sub_group_numel=self.placement.sub_group_numel,
            spans=self.spans,
        )
        self._closing.callback(self.updater.close)
        self.gradients.wait_for_room = self.updater.wait_for_a_job
        self.migration = Migration(self)
        self.optimizer: TieredAdam | ClientOptimizer | None = None
        self.collector: GradientCollector | None = None
        self.early_segments = [
            segment for segment in self.segments if self._may_update_early(segment, segment.state_tier)
        ]
        if options.trains and not self.placement.scratch_bytes:
            self.gradients.reserve(self.transient_gradients(self.placement.homes))
        if options.trains:
            self.optimizer = self._client() or TieredAdam(
                params,
                options.adam,
                segments=self.segments,
                gradients=self.gradients,
                updater=self.updater,
                kernels=self.kernels,
                store=self.store,
                ranks=self.ranks,
                clip_norm=options.clip_norm,
                retain_gradients=options.wishes.retain_gradients,
            )
            if isinstance(self.optimizer, TieredAdam):
                self.optimizer.migration = self.migration
            reducer = None
            if self.ranks.world_size > 1:
                reducer = Reducer(self.segments, self.gradients, self.ranks, self._room_for_bucket)
            self.collector = GradientCollector(
                self.gradients,
                self.optimizer,
                reducer,
                early=self.early_segments,
                still_used=lambda segment: self.state.saved[id(segment)] > 0,
            )
        self.state = ZeroState(
            self.module,
            self.groups,
            self.executor,
            self.collector.take if self.collector is not None else None,
            bound=bound,
            watch_in_place=any(segment.in_place for segment in self.early_segments),
        )
        self._closing.callback(self.state.remove)
        self._recompute_blocks()
        claim(self)
        self._closing.callback(disclaim, self)

    def _room_for_bucket(self, nbytes: int, owner: str) -> Block:
        """Memory of the device tier for gradients. Several ``loss.backward()`` of the user's own before a ``step()`` need more of
        it than is planned: without a budget it is added, with one BudgetError is raised."""
        budget = self.options.budgets.device_bytes
        try:
            return self.executor.make_room(nbytes, owner, patient=budget is not None)
        except BudgetError as error:
            if budget is not None:
                error.add_note(
                    "gradients of a second loss.backward() wait for step() beside those of the first: call "
                    "engine.backward(loss) for each loss, which brings them together over the ranks at once"
                )
                raise
        for added in self._added:
            if (block := added.try_alloc(nbytes, owner)) is not None:
                return block
        accelerator = self.options.accelerator
        arena = accelerator.arena(nbytes) if accelerator is not None else Arena(Tier.DEVICE, nbytes)
        self._closing.callback(arena.close)
        self._added.append(arena)
        return arena.alloc(nbytes, owner)

    def _recompute_blocks(self) -> None:
        """Let the blocks be computed again in the backward pass, where that is wished; see recompute.py."""
        options = self.options
        self.saved_inputs: SavedInputs = InputsAsTheyAre()
        if options.recompute in (Tier.HOST, Tier.NVME):
            room = Room(self._room_for_inputs(), options.accelerator)
            if options.recompute is Tier.HOST:
                self.saved_inputs = InputsInHost(room, options.accelerator)
            else:
                self.saved_inputs = InputsInFile(room, self._inputs_file(), options.accelerator)
        self._closing.callback(self.saved_inputs.close)
        device = options.accelerator.device if options.accelerator is not None else None
        self.recomputer = Recomputer(self.state, self.saved_inputs, device)
        if options.recompute is not None:
            found = find_blocks(self.module, options.grouping.chooser(self.module))
            blocks = [(name, block) for name, block in found if not has_running_statistics(block)]
            self.recomputed = tuple(name for name, _ in blocks)
            self._closing.callback(RecomputedBlocks(blocks, self.recomputer).restore)

    def _room_for_inputs(self) -> Arena | None:
        """The part of the host tier for saved inputs: what was set aside, else what is left; None without a budget."""
        wanted = self.options.wishes.saved_input_bytes
        if wanted:
            arena = arena_within(self.host, wanted)
            self._closing.callback(arena.close)
            return arena
        if self.options.budgets.host_bytes is None:
            return None
        if self.placement.scratch_bytes:
            raise PlacementError(
                "tiers.host_bytes leaves nothing that saved inputs could use (gradients go to a scratch file): set memory aside "
                "for them with tiers.activation_bytes, two inputs of a block at least"
            )
        return self.host

    def _inputs_file(self) -> UnnamedFile:
        """On the first path; its quota is what the state leaves of it."""
        if self.io is None:
            self.io = self.options.open_io()
            self._closing.callback(self.io.close)
        path = self.options.nvme[0]
        taken = -(-self.placement.nvme_bytes // len(self.options.nvme))
        limit = None if path.bytes is None else max(0, path.bytes - taken)
        return UnnamedFile(path.path, self.io, limit=limit)

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

    def settle_home(self, segment: Segment, home: Home) -> None:
        """Note where a segment is at home, and whether compute can use it there."""
        segment.param_tier, segment.state_tier = home.param, home.state
        segment.in_place = segment.persistent or home.param in self.options.wishes.in_place_tiers

    def _check_memory(self) -> None:
        """Refuse budgets (or needs, where there is no budget) beyond what this process can have. Raises BudgetError."""
        budgets, placement = self.options.budgets, self.placement
        wanted = {Tier.HOST: placement.host_bytes if budgets.host_bytes is None else budgets.host_bytes}
        if self.options.accelerator is None:
            wanted[Tier.DEVICE] = placement.device_bytes if budgets.device_bytes is None else budgets.device_bytes
        keys = " + ".join(f"tiers.{tier}_bytes" for tier, nbytes in wanted.items() if nbytes)
        # The module's own parameters move into the tiers: their memory counts as had already.
        held = sum(p.nbytes for p in self.module.parameters() if p.device.type == "cpu")
        total = sum(wanted.values())
        check_budget(keys, total, read_memory_limits(), already_held=min(held, total))

    def _arena(self, tier: Tier, budget: int | None, needed: int) -> Arena:
        nbytes = needed if budget is None else budget
        accelerator = self.options.accelerator if tier is Tier.DEVICE else None
        arena = accelerator.arena(nbytes) if accelerator is not None else Arena(tier, nbytes)
        self._closing.callback(arena.close)
        return arena

    def _open_store(self) -> GenerationStore | None:
        stored = [segment.name for segment in self.segments if segment.stored_planes]
        if not stored:
            return None
        options = self.options
        # Whatever may come to live there later is known to the store, and left out of it for now.
        later = [s.name for s in self.segments if self.can_move and s.trainable and not s.stored_planes]
        shards = [
            replace(segment.shard_spec(), planes=segment.planes) if segment.name in later else segment.shard_spec()
            for segment in self.segments
            if segment.name in (*stored, *later)
        ]
        self.io = options.open_io()
        self._closing.callback(self.io.close)
        store = GenerationStore.open(
            self.decision.links.paths,
            job=options.job,
            rank=self.ranks.rank,
            shards=shards,
            io=self.io,
            generations=options.generations,
            verify=options.verify,
            discard_torn=options.resume is False or not options.keep_state,
            left_out=later,
        )
        self._closing.callback(lambda: store.close(remove=not options.keep_state))
        return store

    def _update_buffers(self) -> list[Block]:
        return self._blocks("update buffers", self.placement.staging_count)

    def _blocks(self, item: str, count: int) -> list[Block]:
        """``count`` equal blocks of the host tier for an item of the placement."""
        if count == 0:
            return []
        nbytes = self.placement.host_items[item] // count
        blocks = [self.host.alloc(nbytes, item) for _ in range(count)]
        for block in blocks:
            self._closing.callback(block.free)
        return blocks

    def _bring_home(self) -> None:
        chunk = self.placement.sub_group_numel
        block = self.staging[0] if self.staging else None
        spare: Arena | None = None
        if block is None and self.store is not None:  # only frozen segments are on NVMe
            spare = Arena(Tier.HOST, min(INITIAL_WRITE_BYTES, chunk * 4))
            block = spare.alloc(spare.nbytes, "initial write")
            chunk = block.nbytes // 4
        self.resumed = self._is_to_resume()
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not is_away(tensor):
                    self.ranks.broadcast(tensor.data)
        InitialState(
            arenas={Tier.DEVICE: self.device, Tier.HOST: self.host},
            kernels=self.kernels,
            store=self.store,
            staging=block,
            chunk_numel=chunk,
            ranks=self.ranks,
        ).bring_home(self.segments, keep_stored=self.resumed)
        if block is not None and spare is not None:
            block.free()
            spare.close()
        if self.options.accelerator is not None:
            for buffer_owner in self.module.modules():
                for name, buffer in buffer_owner.named_buffers(recurse=False):
                    buffer_owner._buffers[name] = buffer.to(self.options.accelerator.device)
        if self.options.compute_dtype is not None:
            # Buffers that no state dict has (rotary frequencies, say) keep their precision, as where transformers loads them.
            for buffer_owner in self.module.modules():
                for name, buffer in buffer_owner.named_buffers(recurse=False):
                    if buffer.is_floating_point() and name not in buffer_owner._non_persistent_buffers_set:
                        buffer_owner._buffers[name] = buffer.to(self.options.compute_dtype)

    def _is_to_resume(self) -> bool:
        """Whether the state that the job's folders kept is gone on with.

        ``resume`` True: it must be there; False: it is dropped; "auto": gone on with where there is any; None: as False, but
        state of a step that was taken is not dropped. Raises StoreError."""
        wanted, keeps = self.options.resume, self.options.keep_state
        if wanted and not keeps:
            raise ValueError("resume needs tiers.keep_state: true, so that there is state to go on with")
        current = self.store.current if self.store is not None else None
        found = self.ranks.union([current is None])[0] is False
        if not found and wanted is True:
            raise StoreError(f"resume: job {self.options.job!r} has no committed state: leave resume out to start anew")
        if found and wanted is None and keeps and current is not None and current.step > 0:
            raise StoreError(
                f"job {self.options.job!r} has kept the state of step {current.step}: pass resume=True to go on from it, "
                f"resume=False to drop it, or use another tiers.job"
            )
        if not (found and wanted):
            return False
        step = float(current.step) if current is not None else 0.0
        if self.ranks.sum(step) != step * self.ranks.world_size:
            raise StoreError(
                f"resume: this rank has kept step {step:.0f}, and others another one: load a checkpoint instead"
            )
        lost = [s.name for s in self.segments if s.trainable and s.state_tier is not Tier.NVME]
        if lost:
            raise StoreError(
                f"resume: the optimizer state of {', '.join(lost[:4])} is placed in memory, which did not survive: load a "
                f"checkpoint, or put all of it on nvme"
            )
        return True

    def _grad_dtype(self, segment: Segment) -> torch.dtype:
        return self.options.grad_dtype or segment.dtype

    def _may_update_early(self, segment: Segment, state_tier: Tier) -> bool:
        """Only what is on NVMe: there the old state stays until the commit. Several ranks must first agree on what is used."""
        wanted = self.options.wishes.overlap_update and self.ranks.world_size == 1 and not self.placement.scratch_bytes
        return wanted and segment.trainable and state_tier is Tier.NVME

    def transient_gradients(self, homes: Mapping[str, Home]) -> set[int]:
        """Ids of the segments whose gradient is given up as soon as it was used, at these homes."""
        if self.options.wishes.retain_gradients:
            return set()
        return {id(s) for s in self.segments if self._may_update_early(s, homes[s.name].state)}

    @property
    def can_move(self) -> bool:
        """Whether homes may change while training: one rank without an accelerator, lamina's own optimizer, state that no
        later process looks for, and old generations that stay while the next is written."""
        options = self.options
        return (
            self.decision.choice is not None
            and self.ranks.world_size == 1
            and options.accelerator is None
            and options.client is None
            and options.trains
            and not options.keep_state
            and options.generations > 1
            and not self.placement.scratch_bytes
        )

    def homes_changed(self) -> None:
        """Let everything that goes by homes take up the present ones. Between two steps."""
        self.early_segments = [
            segment for segment in self.segments if self._may_update_early(segment, segment.state_tier)
        ]
        self.gradients.reserve(self.transient_gradients(self.placement.homes))
        if self.collector is not None:
            self.collector.update_early(self.early_segments)
        self.executor.homes_changed()
        self.state.homes_changed(watch_in_place=any(segment.in_place for segment in self.early_segments))

    # -- the life of a step --------------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[None]:
        """Around every forward and backward pass.

        Raises RuntimeError for a forward pass between ``backward()`` and ``step()`` when parameters that compute uses
        were already updated.
        """
        if not self._in_backward and self.optimizer is not None and self.optimizer.updating:
            ahead = [s.name for s in self.early_segments if s.updated_where_used and self.optimizer.started_early(s)]
            if ahead:
                raise RuntimeError(
                    f"forward between backward() and step(): {', '.join(ahead[:3])}{', …' if len(ahead) > 3 else ''} already "
                    f"have the coming step's values. Call step() first, or write tiers.overlap_update: false"
                )
        return self.state.forward()

    def begin_backward(self, *, last_of_window: bool) -> None:
        self._in_backward = True
        if self.collector is not None:
            self.collector.begin_backward(last_of_window=last_of_window)

    def end_backward(self, *, succeeded: bool = True) -> None:
        self._in_backward = False
        if self.collector is not None:
            self.collector.end_backward()
            if succeeded:
                self.collector.reduce_rest()

    def close_window(self) -> None:
        """Before the optimizer's step."""
        if self.collector is not None:
            self.collector.close_window()

    def finish_step(self) -> None:
        """After the optimizer's step: the fetched copies are stale, the next step's first groups can be fetched."""
        self.migration.after_commit()
        self.executor.end_step()

    def drop_window(self) -> None:
        """Forget the gradients of this window and every update that was started early: nothing has happened."""
        if self.collector is not None:
            self.collector.drop()

    def close(self) -> None:
        """Wait for what is under way and give everything back, in reverse order of construction."""
        self._closing.close()

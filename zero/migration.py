"""Brings segments to other homes while training goes on.

[Note: moving state] Nothing is moved for its own sake. State that is to leave memory is written into the generation that a
step writes anyway; once that is committed its memory is given back. State that is to come into memory is then read into its
place, instead of being read for the next update, and from then on generations are written without it. Parameters whose
state is on NVMe are there, too: to leave memory they are let go of, to come they are read once. Until the step that carries
it is committed nothing has happened, so a failed or skipped step only puts a move off.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lamina.aio_native import Priority
from lamina.tiers import Block, Home, Placement, Plane, SpaceError, Tier, Transaction
from lamina.tiers.nvme.transaction import TransactionState

from .segment import Segment

if TYPE_CHECKING:
    from .runtime import ZeroRuntime


class Migration:
    """Carries out one change of placement at a time, between steps. Used by the training thread only."""

    def __init__(self, runtime: "ZeroRuntime") -> None:
        self._runtime = runtime
        self._target: Placement | None = None
        self._leaving: list[Segment] = []
        self._carried: Transaction | None = None

    @property
    def under_way(self) -> bool:
        """Whether a change was begun and is not complete."""
        return self._target is not None

    def obstacle(self, target: Placement) -> str | None:
        """Why the state cannot be moved to a placement, as a clause; None when it can."""
        runtime = self._runtime
        if not runtime.residence.can_move or runtime.store is None:
            return "state stays where it is here (several ranks, an accelerator, given shares, kept state or another optimizer)"
        old = runtime.placement
        same = (target.sub_group_numel, target.staging_count, target.scratch_bytes)
        if same != (old.sub_group_numel, old.staging_count, old.scratch_bytes):
            return "it needs other update buffers"
        moved = [s for s in runtime.segments if target.homes[s.name] != home_of(s)]
        if any(not s.trainable or s.persistent for s in moved):
            return "it moves frozen or persistent parameters"
        if any(s.kept or target.homes[s.name].kept for s in moved):
            return "it moves part of a segment's state, and its files are laid out for the part that they have"
        nowhere_else = [s for s in moved if Tier.NVME not in (s.state_tier, target.homes[s.name].state)]
        if any(target.homes[s.name].param is not s.param_tier for s in nowhere_else):
            return "it moves parameters from one memory to another that are nowhere else"
        if all(target.homes[s.name].state is not Tier.NVME for s in runtime.segments if s.trainable):
            return "it would leave nothing of the state on nvme"
        return self._no_room(target)

    def begin(self, target: Placement) -> None:
        """Move to a placement without obstacle, with the next steps."""
        self._target = target
        self._leaving = [
            segment
            for segment in self._runtime.segments
            if segment.trainable
            and segment.state_tier is not Tier.NVME
            and target.homes[segment.name].state is Tier.NVME
        ]

    # -- around the generation that a step writes ----------------------------------------------------------------------

    def before_generation(self) -> None:
        """Let the generation that is about to begin hold what leaves memory with it."""
        if not self._leaving:
            return
        try:
            self._leave_out(besides=self._leaving)
        except SpaceError:  # a checkpoint that was made meanwhile has the room
            self._target, self._leaving = None, []

    def write(self, transaction: Transaction) -> None:
        """Into the generation, once everything is updated: the state that leaves memory."""
        handles = []
        for segment in self._leaving:
            for spec in segment.planes:
                view = segment.home_shard() if spec.plane is Plane.PARAM else segment.state[spec.plane].view
                handles.append(transaction.write(segment.name, spec.plane, view))
        for handle in handles:
            handle.wait()
        self._carried = transaction

    def generation_dropped(self) -> None:
        """It is not going to be committed: what was to leave memory is still there and nowhere else."""
        if self._leaving:
            with contextlib.suppress(SpaceError):
                self._leave_out()

    def after_commit(self) -> bool:
        """Between two steps: complete the change if what leaves memory has arrived. True when homes have changed."""
        if self._target is None:
            return False
        carried = self._carried is not None and self._carried.state is TransactionState.COMMITTED
        if self._leaving and not carried:
            return False
        target, leaving = self._target, self._leaving
        self._target, self._leaving, self._carried = None, [], None
        self._settle(target, leaving)
        return True

    # -- the change of homes -------------------------------------------------------------------------------------------

    def _settle(self, target: Placement, leaving: list[Segment]) -> None:
        runtime = self._runtime
        runtime.executor.invalidate()
        was_streamed = {segment.name for segment in runtime.segments if not segment.in_place}
        for segment in leaving:
            for block in segment.state.values():
                block.free()
            segment.state.clear()
            segment.state_tier = Tier.NVME
        coming = [s for s in runtime.segments if s.trainable and target.homes[s.name].param is not s.param_tier]
        for segment in coming:
            self._let_parameters_go(segment)
        for segment in coming:
            if target.homes[segment.name].param is not Tier.NVME:
                self._take_parameters(segment, target.homes[segment.name].param)
        for segment in runtime.segments:
            wanted = target.homes[segment.name].state
            if segment.trainable and wanted is not Tier.NVME and segment.state_tier is Tier.NVME:
                self._take_state(segment, wanted)
        with contextlib.suppress(
            SpaceError
        ):  # then what has left is carried over for nothing, which is slower, not wrong
            self._leave_out()
        runtime.residence.placement = target
        runtime.homes_changed()
        if {segment.name for segment in runtime.segments if not segment.in_place} - was_streamed:
            runtime.executor.forget_trace()  # uses of what was at home were not recorded

    def _let_parameters_go(self, segment: Segment) -> None:
        if segment.home is None:
            return
        if segment.flat is not None and segment.nbytes:
            self._runtime.state.bound.pop(segment.flat.data_ptr(), None)
        segment.unbind()
        segment.home.free()
        segment.home, segment.in_place, segment.param_tier = None, False, Tier.NVME

    def _take_parameters(self, segment: Segment, tier: Tier) -> None:
        runtime = self._runtime
        block = self._arena_alloc(tier, segment.nbytes, f"parameters of {segment.name}")
        self._read(segment, {Plane.PARAM: block})
        segment.home = block
        runtime.residence.settle(segment, Home(param=tier, state=segment.state_tier))
        if segment.in_place:
            segment.bind(block, 0)
            if segment.flat is not None and segment.nbytes:
                runtime.state.bound[segment.flat.data_ptr()] = segment

    def _take_state(self, segment: Segment, tier: Tier) -> None:
        blocks: dict[Plane, Block] = {
            spec.plane: self._arena_alloc(
                tier, segment.layout.shard_numel * spec.itemsize, f"{spec.plane} of {segment.name}"
            )
            for spec in segment.planes
            if spec.plane is not Plane.PARAM
        }
        self._read(segment, blocks)
        segment.state.update(blocks)
        segment.state_tier = tier

    def _read(self, segment: Segment, blocks: Mapping[Plane, Block]) -> None:
        """Fill blocks from the current generation."""
        store = self._runtime.store
        if store is None:
            raise RuntimeError(f"{segment.name} is to come from NVMe, and there is no store")
        handles = [
            store.read(segment.name, plane, block.view, priority=Priority.DEMAND) for plane, block in blocks.items()
        ]
        for handle in handles:
            handle.wait()

    def _arena_alloc(self, tier: Tier, nbytes: int, owner: str) -> Block:
        return (self._runtime.device if tier is Tier.DEVICE else self._runtime.host).alloc(nbytes, owner)

    def _leave_out(self, *, besides: list[Segment] | None = None) -> None:
        """Let generations hold the state that is on NVMe, and ``besides``."""
        store, stay = self._runtime.store, {segment.name for segment in besides or ()}
        if store is None:
            return
        store.leave_out(
            segment.name
            for segment in self._runtime.segments
            if segment.trainable and segment.state_tier is not Tier.NVME and segment.name not in stay
        )

    # -- room ------------------------------------------------------------------------------------------------------------

    def _no_room(self, target: Placement) -> str | None:
        """Whether memory lies so that everything finds a place in one piece, and the disk has room."""
        runtime = self._runtime
        runtime.executor.invalidate()
        for tier, arena in ((Tier.DEVICE, runtime.device), (Tier.HOST, runtime.host)):
            gone, sizes = list(self._going(tier, target)), list(self._coming(tier, target))
            if tier is Tier.HOST:
                gone += runtime.gradients.reserved()
                sizes += runtime.gradients.sizes_for(runtime.early_updates.transient_gradients(target.homes))
            else:
                sizes.append(target.device_items.get("window of fetched groups", 0))
            if not arena.would_fit(sizes, without=gone):
                return f"no hole of the {tier} tier would be large enough"
        held = [s for s in runtime.segments if s.trainable and target.homes[s.name].state is Tier.NVME]
        leaving = [s for s in held if s.state_tier is not Tier.NVME]
        try:
            self._leave_out(besides=leaving)
        except SpaceError as error:
            return str(error)
        self._leave_out()
        return None

    def _going(self, tier: Tier, target: Placement) -> Iterator[Block]:
        """Blocks of a tier that are given back."""
        for segment in self._runtime.segments:
            home = target.homes[segment.name]
            if segment.param_tier is tier and home.param is not tier and segment.home is not None:
                yield segment.home
            if segment.state_tier is tier and home.state is not tier:
                yield from segment.state.values()

    def _coming(self, tier: Tier, target: Placement) -> Iterator[int]:
        """Bytes of the blocks that are taken, in the order in which they are."""
        for segment in self._runtime.segments:
            if target.homes[segment.name].param is tier and segment.param_tier is not tier:
                yield segment.nbytes
        for segment in self._runtime.segments:
            if target.homes[segment.name].state is tier and segment.state_tier is not tier:
                for spec in segment.planes:
                    if spec.plane is not Plane.PARAM:
                        yield segment.layout.shard_numel * spec.itemsize


def home_of(segment: Segment) -> Home:
    """Where a segment lives."""
    return Home(param=segment.param_tier, state=segment.state_tier, kept=segment.kept, kept_on=segment.kept_on)

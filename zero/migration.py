"""Brings segments to other homes while training goes on.

[Note: moving state] Nothing is moved for its own sake. State that is to leave memory is written into the generation that a
step writes anyway; once that is committed its memory is given back. State that is to come into memory is then read into its
place, instead of being read for the next update, and from then on generations are written without it. Parameters whose
state is on NVMe are there, too: to leave memory they are let go of, to come they are read once. Those that are nowhere else
are copied from one memory to the other. Until the step that carries it is committed nothing has happened, so a failed or
skipped step only puts a move off.

[Note: moves on several ranks] All ranks begin a move between the same two steps, and after each step that may have carried it
they tell each other how far they are: it is completed when all have committed what leaves memory and have room for what
comes, given up when one of them cannot, and goes on with the next step otherwise. A rank whose step fails raises as without
a move, and the others wait for it where they would wait anyway, in their next collective.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lamina.aio_native import Priority
from lamina.tiers import Block, Placement, Plane, SpaceError, Tier, Transaction
from lamina.tiers.nvme.transaction import TransactionState

from .memory import tensor_over
from .move_rules import home_of, why_not
from .segment import Segment

if TYPE_CHECKING:
    from .runtime import ZeroRuntime


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """Parameters or state that come into memory, in blocks of these sizes. ``source``: parameters are copied from there, and
    it is given back then; None: they are read from NVMe."""

    segment: Segment
    is_state: bool
    tier: Tier
    sizes: Sequence[int]
    source: Block | None = None
    source_tier: Tier = Tier.NVME


class Migration:
    """Carries out one change of placement at a time, between steps. Used by the training thread only."""

    def __init__(self, runtime: "ZeroRuntime") -> None:
        self._runtime = runtime
        self._target: Placement | None = None
        self._leaving: list[Segment] = []
        self._carried: Transaction | None = None
        self._refused = False

    @property
    def under_way(self) -> bool:
        """Whether a change was begun and is not complete. The same on all ranks."""
        return self._target is not None

    def obstacle(self, target: Placement) -> str | None:
        """Why this rank's state cannot be moved to a placement, as a clause; None when it can."""
        runtime = self._runtime
        if runtime.residence.fixed is not None:
            return runtime.residence.fixed
        if runtime.store is None:
            return "there is no store"
        keeps = runtime.options.keep_state
        return why_not(runtime.segments, runtime.placement, target, keep_state=keeps) or self._no_room(target)

    def begin(self, target: Placement) -> None:
        """Move to a placement without obstacle, with the next steps. On all ranks between the same two steps."""
        self._target = target
        self._leaving = self._that_leave(target)

    # -- around the generation that a step writes ----------------------------------------------------------------------

    def before_generation(self) -> None:
        """Let the generation that is about to begin hold what leaves memory with it."""
        if not self._leaving:
            return
        try:
            self._leave_out(besides=self._leaving)
        except SpaceError:  # a checkpoint that was made meanwhile has the room
            self._refused, self._leaving = True, []

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
        """Between two steps: complete the change if what leaves memory has arrived, on all ranks. True when homes have changed.
        Collective while a change is under way."""
        target, leaving = self._target, self._leaving
        if target is None:
            return False
        carried = not leaving or (self._carried is not None and self._carried.state is TransactionState.COMMITTED)
        order = None if self._refused or not carried else self._order(target)
        given_up = self._refused or (carried and isinstance(order, Tier))
        waits, given_up = self._runtime.ranks.union([not carried, given_up], "completing a move of state together")
        if waits and not given_up:
            return False
        self._target, self._leaving, self._carried, self._refused = None, [], None, False
        if given_up or order is None or isinstance(order, Tier):
            with contextlib.suppress(SpaceError):
                self._leave_out()
            return False
        self._settle(target, leaving, order)
        return True

    # -- the change of homes -------------------------------------------------------------------------------------------

    def _settle(self, target: Placement, leaving: list[Segment], order: Sequence[_Arrival]) -> None:
        runtime = self._runtime
        runtime.executor.invalidate()
        was_streamed = {segment.name for segment in runtime.segments if not segment.in_place}
        runtime.gradients.give_up_places()
        for segment in leaving:
            for block in segment.state.values():
                block.free()
            segment.state.clear()
            segment.state_tier = Tier.NVME
        for segment in self._let_go(target):
            self._let_parameters_go(segment)
        for arrival in order:
            if arrival.is_state:
                self._take_state(arrival.segment, arrival.tier)
            elif arrival.source is not None:
                self._copy_parameters(arrival.segment, arrival.source, arrival.tier)
            else:
                self._take_parameters(arrival.segment, arrival.tier)
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
        """Out of the current generation: this rank's shard, and where every rank keeps all of them the others' from them."""
        block = self._alloc(tier, _home_nbytes(segment), f"parameters of {segment.name}")
        shard = block.view[segment.home_offset : segment.home_offset + segment.shard_nbytes]
        self._read(segment, {Plane.PARAM: shard})
        if segment.replicated and segment.layout.world_size > 1:
            flat = tensor_over(block, segment.dtype, segment.layout.numel)
            self._runtime.ranks.all_gather(flat, f"moved parameters of {segment.name}")
        self._come_home(segment, block, tier)

    def _copy_parameters(self, segment: Segment, source: Block, tier: Tier) -> None:
        block = self._alloc(tier, source.nbytes, f"parameters of {segment.name}")
        block.view[:] = source.view
        self._let_parameters_go(segment)
        self._come_home(segment, block, tier)

    def _come_home(self, segment: Segment, block: Block, tier: Tier) -> None:
        segment.home = block
        self._runtime.residence.settle(segment, replace(home_of(segment), param=tier))
        if segment.in_place:
            segment.bind(block, 0)
            if segment.flat is not None and segment.nbytes:
                self._runtime.state.bound[segment.flat.data_ptr()] = segment

    def _take_state(self, segment: Segment, tier: Tier) -> None:
        blocks: dict[Plane, Block] = {
            spec.plane: self._alloc(tier, segment.layout.shard_numel * spec.itemsize, f"{spec.plane} of {segment.name}")
            for spec in segment.planes
            if spec.plane is not Plane.PARAM
        }
        self._read(segment, {plane: block.view for plane, block in blocks.items()})
        segment.state.update(blocks)
        segment.state_tier = tier

    def _read(self, segment: Segment, views: Mapping[Plane, memoryview]) -> None:
        """Fill memory with this rank's shard of planes in the current generation."""
        store = self._runtime.store
        if store is None:
            raise RuntimeError(f"{segment.name} is to come from NVMe, and there is no store")
        handles = [store.read(segment.name, plane, view, priority=Priority.DEMAND) for plane, view in views.items()]
        for handle in handles:
            handle.wait()

    def _alloc(self, tier: Tier, nbytes: int, owner: str) -> Block:
        return self._runtime.residence.arena(tier).alloc(nbytes, owner)

    def _leave_out(self, *, besides: Sequence[Segment] = ()) -> None:
        """Let generations hold what is on NVMe, and ``besides``."""
        store, stay = self._runtime.store, {segment.name for segment in besides}
        if store is None:
            return
        store.leave_out(
            segment.name
            for segment in self._runtime.segments
            if segment.trainable and not segment.stored_planes and segment.name not in stay
        )

    # -- room ------------------------------------------------------------------------------------------------------------

    def _no_room(self, target: Placement) -> str | None:
        """Whether memory lies so that everything finds a place in one piece, and the disk has room."""
        order = self._order(target)
        if isinstance(order, Tier):
            return f"no hole of the {order} tier would be large enough"
        try:
            self._leave_out(besides=self._that_leave(target))
        except SpaceError as error:
            return str(error)
        self._leave_out()
        return None

    def _order(self, target: Placement) -> list[_Arrival] | Tier:
        """An order in which everything that comes into memory finds a place, after what goes is gone; where there is none, the
        tier that is too small. A copy gives its source back, which may be what another one waits for."""
        runtime = self._runtime
        runtime.executor.invalidate()
        trials = {tier: runtime.residence.arena(tier).trial() for tier in (Tier.DEVICE, Tier.HOST)}
        for tier, block in self._going(target):
            trials[tier].give(block)
        order: list[_Arrival] = []
        waiting = list(self._arrivals(target))
        while waiting:
            still_waiting = []
            for arrival in waiting:
                if not trials[arrival.tier].take(arrival.sizes):
                    still_waiting.append(arrival)
                    continue
                order.append(arrival)
                if arrival.source is not None:
                    trials[arrival.source_tier].give(arrival.source)
            if len(still_waiting) == len(waiting):
                return waiting[0].tier
            waiting = still_waiting
        transient = runtime.early_updates.transient_gradients(target.homes)
        if not trials[Tier.HOST].take(runtime.gradients.sizes_for(transient)):
            return Tier.HOST
        window = target.device_items.get("window of fetched groups", 0)
        return order if trials[Tier.DEVICE].take([window]) else Tier.DEVICE

    def _going(self, target: Placement) -> Iterator[tuple[Tier, Block]]:
        """Blocks that are given back before anything comes."""
        for block in self._runtime.gradients.reserved():
            yield Tier.HOST, block
        for segment in self._that_leave(target):
            for block in segment.state.values():
                yield segment.state_tier, block
        for segment in self._let_go(target):
            if segment.home is not None:
                yield segment.param_tier, segment.home

    def _arrivals(self, target: Placement) -> Iterator[_Arrival]:
        let_go = {segment.name for segment in self._let_go(target)}
        for segment in self._runtime.segments:
            tier = target.homes[segment.name].param
            if tier in (Tier.NVME, segment.param_tier):
                continue
            source = None if segment.name in let_go else segment.home
            yield _Arrival(
                segment=segment,
                is_state=False,
                tier=tier,
                sizes=[_home_nbytes(segment)],
                source=source,
                source_tier=segment.param_tier,
            )
        for segment in self._runtime.segments:
            tier = target.homes[segment.name].state
            if tier is not Tier.NVME and segment.trainable and segment.state_tier is Tier.NVME:
                sizes = [
                    segment.layout.shard_numel * spec.itemsize
                    for spec in segment.planes
                    if spec.plane is not Plane.PARAM
                ]
                yield _Arrival(segment=segment, is_state=True, tier=tier, sizes=sizes)

    def _that_leave(self, target: Placement) -> list[Segment]:
        """Segments whose state goes from memory to NVMe."""
        return [
            segment
            for segment in self._runtime.segments
            if segment.trainable
            and segment.state_tier is not Tier.NVME
            and target.homes[segment.name].state is Tier.NVME
        ]

    def _let_go(self, target: Placement) -> list[Segment]:
        """Segments whose parameters go elsewhere and are on NVMe, too, by the time that they do."""
        return [
            segment
            for segment in self._runtime.segments
            if segment.trainable
            and target.homes[segment.name].param is not segment.param_tier
            and Tier.NVME in (segment.state_tier, target.homes[segment.name].state)
        ]


def _home_nbytes(segment: Segment) -> int:
    """Bytes of the block that parameters are at home in."""
    return segment.nbytes if segment.replicated else segment.shard_nbytes

"""Brings segments to other homes while training goes on.

[Note: moving state] Nothing is moved for its own sake. State that is to leave memory is written into the generation that a
step writes anyway; once that is committed its memory is given back. State that is to come into memory is then read into its
place, instead of being read for the next update, and from then on generations are written without it. Parameters whose
state is on NVMe are there, too: to leave memory they are let go of, to come they are read once. Those that are nowhere else
are copied from one memory to the other. Until the step that carries it is committed nothing has happened, so a failed or
skipped step only puts a move off.

[Note: divided states] A state of which memory keeps the front leaves as one that memory has all of: the generation that carries
it holds the front, too. Another part of it, or all, then comes into memory as from any state on NVMe. So does what is to lie in
another memory: at no time does it take room twice. Where memory lies so that something finds no place, everything leaves and
comes back.

[Note: moves on several ranks] All ranks begin a move between the same two steps, and after each step that may have carried it
they tell each other how far they are: it is completed when all have committed what leaves memory and have room for what
comes, given up when one of them cannot, and goes on with the next step otherwise. A rank whose step fails raises as without
a move, and the others wait for it where they would wait anyway, in their next collective.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lamina.aio_native import Priority
from lamina.tiers import Block, Home, Placement, Plane, SpaceError, Tier, Transaction
from lamina.tiers.nvme.transaction import TransactionState
from lamina.tiers.placement.needs import SAVED_INPUTS
from lamina.zero.groups.memory import tensor_over
from lamina.zero.groups.segment import Segment

from .move_plan import Arrival, MovePlan, home_nbytes
from .move_rules import home_of, why_not

if TYPE_CHECKING:
    from lamina.zero.runtime import ZeroRuntime


class Migration:
    """Carries out one change of placement at a time, between steps. Used by the training thread only."""

    def __init__(self, runtime: "ZeroRuntime") -> None:
        self._runtime = runtime
        self._plan: MovePlan | None = None
        self._carried: Transaction | None = None
        self._refused = False

    @property
    def under_way(self) -> bool:
        """Whether a change was begun and is not complete. The same on all ranks."""
        return self._plan is not None

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
        self._plan = self._way_to(target)

    @property
    def _leaving(self) -> Sequence[Segment]:
        """Those whose state the coming generations are to hold, too."""
        return self._plan.leaving if self._plan is not None and not self._refused else ()

    # -- around the generation that a step writes ----------------------------------------------------------------------

    def before_generation(self) -> None:
        """Let the generation that is about to begin hold what leaves memory with it."""
        if not self._leaving:
            return
        try:
            self._leave_out(besides=self._leaving)
        except SpaceError:  # a checkpoint that was made meanwhile has the room
            self._refused = True

    def write(self, transaction: Transaction) -> None:
        """Into the generation, once everything is updated: the state that leaves memory."""
        handles = []
        for segment in self._leaving:
            for spec in segment.planes:
                memory = segment.home_shard() if spec.plane is Plane.PARAM else segment.state[spec.plane].view
                front = memory[: segment.numel_in_place * spec.itemsize]
                handles.append(transaction.write(segment.name, spec.plane, front))
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
        plan = self._plan
        if plan is None:
            return False
        carried = not self._leaving or (self._carried is not None and self._carried.state is TransactionState.COMMITTED)
        order = None if self._refused or not carried else self._order(plan)
        given_up = self._refused or (carried and isinstance(order, Tier))
        waits, given_up = self._runtime.ranks.union([not carried, given_up], "completing a move of state together")
        if waits and not given_up:
            return False
        self._plan, self._carried, self._refused = None, None, False
        if given_up or order is None or isinstance(order, Tier):
            with contextlib.suppress(SpaceError):
                self._leave_out()
            return False
        self._settle(plan, order)
        return True

    # -- the change of homes -------------------------------------------------------------------------------------------

    def _settle(self, plan: MovePlan, order: Sequence[Arrival]) -> None:
        runtime = self._runtime
        runtime.executor.invalidate()
        was_streamed = {segment.name for segment in runtime.segments if not segment.in_place}
        runtime.gradients.give_up_places()
        for segment in plan.leaving:
            for block in segment.state.values():
                block.free()
            segment.state.clear()
            runtime.residence.settle(segment, Home(param=segment.param_tier, state=Tier.NVME))
        for segment in plan.let_go:
            self._let_parameters_go(segment)
        for arrival in order:
            if arrival.state is not None:
                self._take_state(arrival.segment, arrival.state, arrival.tier)
            elif arrival.source is not None:
                self._copy_parameters(arrival.segment, arrival.source, arrival.tier)
            else:
                self._take_parameters(arrival.segment, arrival.tier)
        # Without room what has left is carried over for nothing, which is slower, not wrong.
        with contextlib.suppress(SpaceError):
            self._leave_out()
        runtime.residence.placement = plan.target
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
        block = self._alloc(tier, home_nbytes(segment), f"parameters of {segment.name}")
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
        self._runtime.residence.settle(segment, replace(home_of(segment), param=tier, late=False))
        if segment.in_place:
            segment.bind(block, 0)
            if segment.flat is not None and segment.nbytes:
                self._runtime.state.bound[segment.flat.data_ptr()] = segment

    def _take_state(self, segment: Segment, home: Home, tier: Tier) -> None:
        """All of it, or the front that is to be kept."""
        numel = home.kept or segment.layout.shard_numel
        blocks: dict[Plane, Block] = {
            spec.plane: self._alloc(tier, numel * spec.itemsize, f"{spec.plane} of {segment.name}")
            for spec in segment.planes
            if spec.plane is not Plane.PARAM
        }
        self._read(segment, {plane: block.view for plane, block in blocks.items()})
        segment.state.update(blocks)
        self._runtime.residence.settle(segment, replace(home, param=segment.param_tier))

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
        goes = [segment for segment in self._runtime.segments if segment.trainable and segment.name not in stay]
        store.leave_out(
            [segment.name for segment in goes if not segment.stored_planes],
            {segment.name: segment.kept for segment in goes if segment.kept},
        )

    # -- room ------------------------------------------------------------------------------------------------------------

    def _no_room(self, target: Placement) -> str | None:
        """Whether memory lies so that everything finds a place in one piece, and the disk has room."""
        plan = self._way_to(target)
        order = self._order(plan)
        if isinstance(order, Tier):
            return f"no hole of the {order} tier would be large enough"
        try:
            self._leave_out(besides=plan.leaving)
        except SpaceError as error:
            return str(error)
        self._leave_out()
        return None

    def _inputs_room(self, target: Placement) -> int:
        """Bytes of host memory that saved inputs are to find; none where they have theirs already."""
        return target.host_items.get(SAVED_INPUTS, 0) if self._runtime.options.inputs_share_host else 0

    def _way_to(self, target: Placement) -> MovePlan:
        """The one that moves least, if memory lies so that everything finds a place."""
        plan = MovePlan(self._runtime.segments, target)
        return MovePlan(self._runtime.segments, target, anew=True) if isinstance(self._order(plan), Tier) else plan

    def _order(self, plan: MovePlan) -> list[Arrival] | Tier:
        """An order in which everything that comes into memory finds a place, after what goes is gone; where there is none, the
        tier that is too small. A copy gives its source back, which may be what another one waits for."""
        runtime = self._runtime
        runtime.executor.invalidate()
        trials = {tier: runtime.residence.arena(tier).trial() for tier in (Tier.DEVICE, Tier.HOST)}
        for block in runtime.gradients.reserved():
            trials[Tier.HOST].give(block)
        for tier, block in plan.given_back():
            trials[tier].give(block)
        order: list[Arrival] = []
        waiting = list(plan.arrivals())
        while waiting:
            still_waiting: list[Arrival] = []
            for arrival in waiting:
                behind = arrival.state is not None and any(arrival.segment is other.segment for other in still_waiting)
                if behind or not trials[arrival.tier].take(arrival.sizes):
                    still_waiting.append(arrival)
                    continue
                order.append(arrival)
                if arrival.source is not None:
                    trials[arrival.source_tier].give(arrival.source)
            if len(still_waiting) == len(waiting):
                return waiting[0].tier
            waiting = still_waiting
        transient = runtime.early_updates.transient_gradients(plan.target.homes)
        if not trials[Tier.HOST].take([*runtime.gradients.sizes_for(transient), self._inputs_room(plan.target)]):
            return Tier.HOST
        window = plan.target.device_items.get("window of fetched groups", 0)
        return order if trials[Tier.DEVICE].take([window]) else Tier.DEVICE

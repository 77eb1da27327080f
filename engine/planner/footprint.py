"""Bytes of every kind on every tier in every phase of one rank, item by item."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lamina.engine.planner.case import Case
from lamina.engine.planner.fragments import fragment_items
from lamina.engine.planner.items import ALWAYS, TRAINED, Item, Kind, Phase
from lamina.engine.planner.pass_items import activation_items, staging_items, window_items
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.segments import FP32
from lamina.engine.planner.state_items import gradient_items, optimizer_items, parameter_items


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """All items of the fullest rank."""

    items: tuple[Item, ...]
    ranks_per_host: int
    checkpoint_bytes: int
    """Space that one saved checkpoint of this rank pins or takes, wherever it goes; not part of any peak."""

    def of(self, tier: str, phase: Phase) -> dict[Kind, int]:
        """Bytes by kind on ``tier`` in ``phase``."""
        result: dict[Kind, int] = {}
        for item in self.items:
            if item.tier == tier and phase in item.phases and item.nbytes:
                result[item.kind] = result.get(item.kind, 0) + item.nbytes
        return result

    def arena(self, tier: str, *, built_only: bool = False) -> dict[Kind, int]:
        """Bytes by kind that one rank takes of the tier's byte budget, in which everything has a place of its own.

        ``built_only``: no more than is used before the first step.
        """
        result: dict[Kind, int] = {}
        for item in self.items:
            if item.tier == tier and item.arena and item.nbytes and (Phase.INIT in item.phases or not built_only):
                result[item.kind] = result.get(item.kind, 0) + item.nbytes
        return result

    def arena_peak(self, tier: str) -> int:
        """The most that one rank takes of the tier's byte budget: what the engine's own counters show."""
        return sum(self.arena(tier).values())

    def resident(self, tiers: Sequence[str], phase: Phase) -> dict[Kind, int]:
        """Bytes by kind that one process occupies when ``tiers`` are all host memory.

        An arena's pages are taken when they are first used and stay then: from the first step on arenas count at
        their fullest, all else as it is in ``phase``.
        """
        result: dict[Kind, int] = {}
        for tier in tiers:
            outside = [item for item in self.items if item.tier == tier and not item.arena and phase in item.phases]
            held = self.arena(tier, built_only=phase is Phase.INIT)
            for kind, nbytes in (*held.items(), *((item.kind, item.nbytes) for item in outside)):
                result[kind] = result.get(kind, 0) + nbytes
        return result

    def peaks(self, tier: str) -> dict[Phase, int]:
        """Bytes on ``tier`` by phase."""
        return {phase: sum(self.of(tier, phase).values()) for phase in Phase}

    def peak_phase(self, tier: str) -> Phase:
        """The phase that needs most of ``tier``."""
        peaks = self.peaks(tier)
        return max(peaks, key=lambda phase: peaks[phase])

    def peak(self, tier: str) -> int:
        """The most that one rank needs of ``tier``."""
        return max(self.peaks(tier).values())

    def host_peak(self, tier: str) -> int:
        """The most that all ranks of one host need of ``tier``."""
        return self.peak(tier) * self.ranks_per_host


def footprint(case: Case) -> Footprint:
    """The bytes of the fullest rank. Raises PlanError when the split is impossible."""
    items = (
        *parameter_items(case),
        *optimizer_items(case),
        *gradient_items(case),
        *window_items(case),
        *activation_items(case),
        *staging_items(case),
        *_runtime(case),
        *_copies(case),
    )
    items = (*items, *fragment_items(case, items), *_build(case, items))
    if case.wishes.separate_device and case.place.optimizer != DEVICE:
        # Page-locked host memory and the device's arena are taken whole before the first step.
        items = tuple(replace(item, phases=ALWAYS) if item.arena else item for item in items)
    return Footprint(
        items=tuple(item for item in items if item.nbytes),
        ranks_per_host=case.machine.devices_per_host,
        checkpoint_bytes=_checkpoint_bytes(case),
    )


def _build(case: Case, items: Sequence[Item]) -> Iterator[Item]:
    """The model as it is built, in fp32.

    Where the tiers are this memory, the model is let go of group by group as its state moves in: of a model that is built
    whole only that counts which is more than the state.
    """
    group, whole, zero_init = max(case.slice.groups) * FP32, case.slice.numel * FP32, case.buffers.zero_init
    built = group if zero_init else whole
    formula = "4 B x " + ("the largest group" if zero_init else "the whole model: build it inside zero.Init")
    if case.machine.shared_memory and not zero_init:
        state = sum(item.nbytes for item in items if item.arena and item.tier != NVME and Phase.INIT in item.phases)
        built, formula = max(group, whole - state), f"{formula}, less the state that takes its place"
    init = frozenset({Phase.INIT})
    yield Item(tier=HOST, kind=Kind.BUILD, nbytes=built, phases=init, formula=formula)


def _checkpoint_bytes(case: Case) -> int:
    planes = case.planes.values()
    trained = sum(s.shard_bytes(size) for s in case.segments if s.grad_itemsize for size in planes)
    return trained + sum(s.shard_bytes(s.param_itemsize) for s in case.segments if not s.grad_itemsize)


def _copies(case: Case) -> Iterator[Item]:
    """Between processes of one host gloo works on copies, in its own threads: one of what goes in, one of what comes out."""
    if not case.machine.shared_memory or case.slice.ranks < 2:
        return
    largest = max(case.slice.trainable) * case.load.itemsize
    gathered = max(case.needs.window_sizes(), default=0)
    formula = "in and out of two reductions under way and of one gathered group"
    yield Item(tier=HOST, kind=Kind.COPIES, nbytes=4 * largest + 2 * gathered, phases=TRAINED, formula=formula)


def _runtime(case: Case) -> Iterator[Item]:
    machine = case.machine
    if machine.device_reserve_bytes:
        formula = "context, collectives, library workspaces"
        nbytes = machine.device_reserve_bytes
        yield Item(tier=DEVICE, kind=Kind.RUNTIME, nbytes=nbytes, phases=ALWAYS, formula=formula)
    yield Item(
        tier=HOST,
        kind=Kind.RUNTIME,
        nbytes=machine.process_bytes,
        phases=ALWAYS,
        formula="interpreter, torch, driver",
    )

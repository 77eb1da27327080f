"""Whether a footprint fits a machine, what is in the way, and what would mend it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lamina.engine.planner.case import Case
from lamina.engine.planner.footprint import Footprint, footprint
from lamina.engine.planner.items import Kind, Phase
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.quantity import format_bytes

_STAGE_3 = "stage 3"


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """One tier against its limit: the device tier of one rank, host and nvme of one host."""

    tier: str
    need: int
    limit: int
    reserve: int = 0
    """Bytes of the tier that are left to everything else; ``limit`` is what remains."""
    phase: str
    """Where the peak is."""
    by_kind: dict[Kind, int]
    """Bytes of the peak phase."""

    @property
    def fits(self) -> bool:
        """The peak is within the limit."""
        return self.need <= self.limit

    @property
    def offender(self) -> tuple[Kind, int] | None:
        """The largest kind."""
        if not self.by_kind:
            return None
        kind = max(self.by_kind, key=lambda name: self.by_kind[name])
        return kind, self.by_kind[kind]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Bytes of an overfull tier that need not be there."""

    tier: str
    what: str
    saves: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {format_bytes(self.saves)} less on {self.tier} with {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All tiers of one case."""

    tiers: tuple[TierUse, ...]
    causes: tuple[Cause, ...]
    """Empty when it fits; else what could be moved or made smaller, largest first."""

    @property
    def fits(self) -> bool:
        """Every tier is within its limit."""
        return all(use.fits for use in self.tiers)

    @property
    def overfull(self) -> TierUse | None:
        """The tier that is most over its limit."""
        over = [use for use in self.tiers if not use.fits]
        return max(over, key=lambda use: use.need - use.limit) if over else None


def fit(case: Case, held: Footprint | None = None) -> Fit:
    """Compare every tier's peak with its limit."""
    held = footprint(case) if held is None else held
    tiers = tuple(_uses(case, held))
    over = [use for use in tiers if not use.fits]
    causes = tuple(cause for use in over for cause in _causes(case, held, use.tier))
    return Fit(tiers=tiers, causes=causes)


def fits(case: Case) -> bool:
    """Whether every tier holds its part; without the search for causes."""
    return all(use.fits for use in _uses(case, footprint(case)))


def _uses(case: Case, held: Footprint) -> Iterator[TierUse]:
    machine, ranks = case.machine, held.ranks_per_host
    host, reserve = machine.host_bytes, machine.host_reserve_bytes
    if machine.shared_memory:
        # A device budget is a limit of its own; the memory of both tiers is the host's.
        if machine.device_bytes:
            yield _arena_use(held, machine.device_bytes)
        yield _use(HOST, {phase: held.resident((DEVICE, HOST), phase) for phase in Phase}, ranks, host, reserve)
    else:
        yield _use(DEVICE, {phase: held.of(DEVICE, phase) for phase in Phase}, 1, machine.device_bytes)
        yield _use(HOST, {phase: held.of(HOST, phase) for phase in Phase}, ranks, host, reserve)
    yield _use(NVME, {phase: held.of(NVME, phase) for phase in Phase}, ranks, machine.nvme_bytes)


def _use(tier: str, kinds: Mapping[Phase, Mapping[Kind, int]], ranks: int, whole: int, reserve: int = 0) -> TierUse:
    peaks = {phase: sum(by_kind.values()) for phase, by_kind in kinds.items()}
    phase = max(peaks, key=lambda each: peaks[each])
    by_kind = {kind: nbytes * ranks for kind, nbytes in kinds[phase].items()}
    return TierUse(
        tier=tier,
        need=peaks[phase] * ranks,
        limit=max(whole - reserve, 0),
        reserve=reserve,
        phase=phase.value,
        by_kind=by_kind,
    )


def _arena_use(held: Footprint, limit: int) -> TierUse:
    by_kind = held.arena(DEVICE)
    need = sum(by_kind.values())
    return TierUse(tier=DEVICE, need=need, limit=limit, phase=held.peak_phase(DEVICE).value, by_kind=by_kind)


def _causes(case: Case, held: Footprint, tier: str) -> list[Cause]:
    """Single changes of the case and what each would save on ``tier``, the small ones left out."""
    before = _need(case, held, tier)
    found = []
    for what, remedy, changed in _changes(case):
        saves = before - _need(changed, footprint(changed), tier)
        if saves > 0.02 * before:
            found.append(Cause(tier=tier, what=what, saves=saves, remedy=remedy))
    # Another stage is another way of working: named after what is in the way at this one.
    return sorted(found, key=lambda cause: (cause.remedy == _STAGE_3, -cause.saves))


def _need(case: Case, held: Footprint, tier: str) -> int:
    return next(use.need for use in _uses(case, held) if use.tier == tier)


def _changes(case: Case) -> Iterator[tuple[str, str, Case]]:
    place, load = case.place, case.load
    if place.optimizer == DEVICE:
        remedy = "offload_optimizer to host" + ("" if place.stage else " at stage 1")
        moved = _placed(case, stage=max(place.stage, 1), optimizer=HOST, grad=HOST)
        yield "optimizer state on the device", remedy, moved
    if place.optimizer == HOST and case.machine.nvme_bytes:
        remedy = "offload_optimizer to nvme"
        yield "optimizer state in host memory", remedy, _placed(case, optimizer=NVME, grad=HOST)
    if place.grad == HOST and place.optimizer == NVME:
        yield "gradients in host memory", "gradients on nvme", _placed(case, grad=NVME)
    if place.stage < 3 and case.slice.ranks > 1:
        yield "parameters whole on every rank", _STAGE_3, _placed(case, stage=3)
    if place.stage == 3 and place.param == DEVICE and place.optimizer != DEVICE:
        yield "parameters on the device", "offload_param to host", _placed(case, param=HOST)
    if load.micro_batch > 1:
        remedy = f"micro-batch 1 and gradient accumulation {load.micro_batch * load.accumulation}"
        smaller = replace(load, micro_batch=1, accumulation=load.accumulation * load.micro_batch)
        yield f"activations of the micro-batch of {load.micro_batch}", remedy, replace(case, load=smaller)
    if not load.checkpoint_interval:
        again = replace(load, checkpoint_interval=1)
        yield "activations of all blocks", "activation checkpointing", replace(case, load=again)
    elif place.activations == DEVICE:
        yield (
            "activation checkpoints on the device",
            "checkpoints in host memory",
            _placed(case, activations=HOST),
        )
    if case.buffers.generations > 1:
        one = replace(case.buffers, generations=1)
        remedy = "generations 1 (gives up resuming after a crash within a step)"
        yield "two generations on nvme", remedy, replace(case, buffers=one)


def _placed(case: Case, **changes: object) -> Case:
    return replace(case, place=replace(case.place, **changes))  # type: ignore[arg-type]

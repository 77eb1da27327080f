"""Bytes of every kind on every tier in every phase of one rank, item by item."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from lamina.engine.planner.activations import activation_bytes
from lamina.engine.planner.case import Case
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    PARAM,
    REMAINDER,
    nvme_bytes,
)


class Phase(StrEnum):
    """Parts of a run whose peaks differ."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    SAVE = "save"
    LOAD = "load"


class Kind(StrEnum):
    """What bytes are there for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    IN_FLIGHT = "gradients in flight"
    MASTER = "master"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    CHECKPOINTS = "activation checkpoints"
    LOGITS = "logits"
    WINDOW = "gathered window"
    BUCKETS = "buckets"
    PINNED = "pinned buffers"
    STAGING = "checkpoint staging"
    BUILD = "model being built"
    RUNTIME = "process and runtime"


ALWAYS = frozenset(Phase)
TRAINED = frozenset({Phase.FORWARD, Phase.BACKWARD})
_OUTSIDE = frozenset(
    {Kind.ACTIVATIONS, Kind.CHECKPOINTS, Kind.LOGITS, Kind.IN_FLIGHT, Kind.STAGING, Kind.BUILD, Kind.RUNTIME}
)
_PLANE_KIND = {
    PARAM: Kind.PARAMETERS,
    REMAINDER: Kind.MASTER,
    MASTER: Kind.MASTER,
    EXP_AVG: Kind.MOMENTS,
    EXP_AVG_SQ: Kind.MOMENTS,
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes of one kind on one tier of one rank while ``phases`` last."""

    tier: str
    kind: Kind
    nbytes: int
    phases: frozenset[Phase]
    formula: str
    """How the figure comes about, in words."""

    @property
    def arena(self) -> bool:
        """Taken from the tier's byte budget, not by autograd, the driver or the interpreter."""
        return self.kind not in _OUTSIDE


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

    def arena_peak(self, tier: str) -> int:
        """The most that one rank takes of the tier's byte budget: what the engine's own counters show."""
        mine = [item for item in self.items if item.tier == tier and item.arena]
        return max(sum(item.nbytes for item in mine if phase in item.phases) for phase in Phase)

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
        *_parameters(case),
        *_optimizer(case),
        *_gradients(case),
        *_window(case),
        *_activations(case),
        *_staging(case),
        *_runtime(case),
    )
    return Footprint(
        items=tuple(item for item in items if item.nbytes),
        ranks_per_host=case.machine.devices_per_host,
        checkpoint_bytes=_checkpoint_bytes(case),
    )


def _checkpoint_bytes(case: Case) -> int:
    part = case.slice
    frozen = sum(part.frozen_shards) * case.load.itemsize
    return nvme_bytes(part.trainable_shards, case.planes, generations=1) + frozen


def _parameters(case: Case) -> Iterator[Item]:
    part, size, tier = case.slice, case.load.itemsize, case.place.param
    if tier == NVME:
        copies = case.buffers.generations + case.buffers.checkpoints_kept
        moving = nvme_bytes(part.trainable_shards, {PARAM: size}, generations=copies)
        still = nvme_bytes(part.frozen_shards, {PARAM: size}, generations=1)
        formula = f"{size} B x trainable / {part.ranks} ranks x {copies} generations + frozen once"
        yield Item(tier=NVME, kind=Kind.PARAMETERS, nbytes=moving + still, phases=ALWAYS, formula=formula)
        return
    numel = sum(part.shards) if case.place.stage == 3 else part.numel
    split = f" / {part.ranks} ranks" if case.place.stage == 3 else ""
    formula = f"{size} B x {part.numel}{split}"
    yield Item(tier=tier, kind=Kind.PARAMETERS, nbytes=numel * size, phases=ALWAYS, formula=formula)


def _optimizer(case: Case) -> Iterator[Item]:
    part, tier = case.slice, case.place.optimizer
    shards = part.trainable if case.place.stage == 0 else part.trainable_shards
    split = "" if case.place.stage == 0 else f" / {part.ranks} ranks"
    copies = case.buffers.generations + case.buffers.checkpoints_kept
    for plane, size in case.planes.items():
        if plane == PARAM and not case.param_copy:
            continue
        if tier == NVME:
            nbytes = nvme_bytes(shards, {plane: size}, generations=copies)
            formula = f"{plane}: {size} B x trainable{split} x {copies} generations"
        else:
            nbytes, formula = sum(shards) * size, f"{plane}: {size} B x trainable{split}"
        yield Item(tier=tier, kind=_PLANE_KIND[plane], nbytes=nbytes, phases=ALWAYS, formula=formula)


def _gradients(case: Case) -> Iterator[Item]:
    part, load, tier = case.slice, case.load, case.place.grad
    shards = part.trainable if case.place.stage < 2 else part.trainable_shards
    split = "" if case.place.stage < 2 else f" / {part.ranks} ranks"
    nbytes = nvme_bytes(shards, {"grad": load.grad_bytes}, generations=1) if tier == NVME else 0
    held = frozenset({Phase.BACKWARD, Phase.UPDATE} | ({Phase.FORWARD} if load.accumulation > 1 else set()))
    yield Item(
        tier=tier,
        kind=Kind.GRADIENTS,
        nbytes=nbytes or sum(shards) * load.grad_bytes,
        # Files and host memory for gradients are reserved once.
        phases=held if tier == DEVICE else ALWAYS,
        formula=f"{load.grad_bytes} B x trainable{split}",
    )
    if case.buffers.half_gradients_kept and load.itemsize < load.grad_bytes and case.place.stage < 2:
        formula = f"{load.itemsize} B x trainable, whole until reduced"
        nbytes = part.trainable_numel * load.itemsize
        yield Item(tier=DEVICE, kind=Kind.GRADIENTS, nbytes=nbytes, phases=held, formula=formula)
    elif tier != DEVICE or load.itemsize < load.grad_bytes or case.place.stage >= 2:
        # Autograd's own output of the group in work, and the one before it that is still on its way.
        nbytes = (2 if len(part.groups) > 2 else 1) * max(part.trainable[1:], default=0) * load.itemsize
        nbytes += part.trainable[0] * load.itemsize
        formula = f"{load.itemsize} B x (root group + two blocks in flight)"
        yield Item(
            tier=DEVICE,
            kind=Kind.IN_FLIGHT,
            nbytes=nbytes,
            phases=frozenset({Phase.BACKWARD}),
            formula=formula,
        )
    if case.buffers.reduce_bucket is not None and part.ranks > 1:
        numel = min(case.buffers.reduce_bucket, part.trainable_numel) * case.buffers.bucket_count
        formula = f"{load.itemsize} B x {case.buffers.bucket_count} buckets"
        yield Item(
            tier=DEVICE,
            kind=Kind.BUCKETS,
            nbytes=numel * load.itemsize,
            phases=frozenset({Phase.BACKWARD}),
            formula=formula,
        )


def window_numel(case: Case) -> int:
    """Elements of gathered groups: the largest ones, as many as are in use and fetched ahead at once.

    With ``max_live`` set: so many elements of blocks (the one in use at least) and the root group.
    """
    part, own = case.slice, case.buffers
    if own.max_live is None:
        return sum(sorted(part.groups, reverse=True)[: 1 + own.lookahead])
    return part.root + max(min(own.max_live, sum(part.groups[1:])), part.largest_block)


def _window(case: Case) -> Iterator[Item]:
    if not case.gathers:
        return
    size = case.load.itemsize
    numel = window_numel(case)
    formula = f"{size} B x {numel}: the groups in use and fetched ahead"
    yield Item(tier=DEVICE, kind=Kind.WINDOW, nbytes=numel * size, phases=TRAINED, formula=formula)


def _activations(case: Case) -> Iterator[Item]:
    place, load = case.place, case.load
    acts = activation_bytes(
        case.model,
        load,
        layers=case.slice.layers,
        tensor=place.tensor,
        in_flight=min(place.pipeline, load.accumulation),
    )
    if load.checkpoint_interval:
        where = place.activations
        formula = f"{load.itemsize} B x {load.tokens} tokens x hidden x blocks / interval"
        yield Item(tier=where, kind=Kind.CHECKPOINTS, nbytes=acts.saved, phases=TRAINED, formula=formula)
        if where != DEVICE:
            stream = 2 * load.tokens * case.model.hidden * load.itemsize
            yield Item(
                tier=HOST if where == NVME else DEVICE,
                kind=Kind.PINNED,
                nbytes=stream,
                phases=TRAINED,
                formula="two activation checkpoints on their way",
            )
    else:
        formula = f"{load.tokens} tokens x all that {case.slice.layers} blocks keep"
        yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.saved, phases=TRAINED, formula=formula)
    backward = frozenset({Phase.BACKWARD})
    # Logits and the recomputed block never live at once: the larger counts.
    inner = acts.working + acts.gradient
    formula = "embedding and last norm, kept over the pass"
    yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.embedding, phases=TRAINED, formula=formula)
    if acts.logits >= inner:
        formula = f"{load.tokens} tokens x vocabulary {case.model.vocab}: logits, log-probabilities, gradient"
        yield Item(tier=DEVICE, kind=Kind.LOGITS, nbytes=acts.logits, phases=TRAINED, formula=formula)
    else:
        formula = "one interval computed again, and gradients of activations"
        yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=inner, phases=backward, formula=formula)
        formula = "logits and log-probabilities"
        yield Item(
            tier=DEVICE,
            kind=Kind.LOGITS,
            nbytes=acts.logits,
            phases=frozenset({Phase.FORWARD}),
            formula=formula,
        )


def _staging(case: Case) -> Iterator[Item]:
    part, load, place, own = case.slice, case.load, case.place, case.buffers
    gpu = not case.machine.shared_memory
    largest = max(part.shards)
    update = frozenset({Phase.UPDATE})
    if place.param == NVME and gpu:
        nbytes = (1 + own.lookahead) * largest * load.itemsize
        formula = f"{1 + own.lookahead} group shards read from nvme for the device"
        yield Item(tier=HOST, kind=Kind.PINNED, nbytes=nbytes, phases=TRAINED, formula=formula)
    if place.grad != DEVICE and gpu:
        nbytes = 2 * largest * load.itemsize
        yield Item(
            tier=HOST,
            kind=Kind.PINNED,
            nbytes=nbytes,
            phases=frozenset({Phase.BACKWARD}),
            formula="two group shards of gradients from the device",
        )
    if place.optimizer == NVME:
        per_param = sum(case.planes.values()) + (load.grad_bytes if place.grad == NVME else 0)
        sub_group = min(own.sub_group, max(part.trainable_shards, default=0))
        nbytes = own.update_depth * sub_group * per_param
        formula = f"{own.update_depth} sub-groups of {sub_group} x {per_param} B"
        yield Item(tier=HOST, kind=Kind.PINNED, nbytes=nbytes, phases=update, formula=formula)
    yield Item(
        tier=HOST,
        kind=Kind.STAGING,
        nbytes=own.io_staging_bytes,
        phases=frozenset({Phase.SAVE, Phase.LOAD}),
        formula="state is saved and loaded in pieces",
    )
    built = max(part.groups) if own.zero_init else part.numel
    yield Item(
        tier=HOST,
        kind=Kind.BUILD,
        nbytes=built * 4,
        phases=frozenset({Phase.INIT}),
        formula="4 B x " + ("the largest group" if own.zero_init else "the whole model: build it inside zero.Init"),
    )


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

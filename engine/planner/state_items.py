"""State that outlives a pass: parameters, optimizer planes, held gradients."""

from collections.abc import Iterator

from lamina.engine.planner.case import Case
from lamina.engine.planner.items import ALWAYS, ON_THE_WAY_BACK, TRAINED, Item, Kind, Phase
from lamina.engine.planner.placement import DEVICE, NVME
from lamina.engine.planner.state_bytes import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    PARAM,
    REMAINDER,
    nvme_bytes,
)

_PLANE_KIND = {
    PARAM: Kind.PARAMETERS,
    REMAINDER: Kind.MASTER,
    MASTER: Kind.MASTER,
    EXP_AVG: Kind.MOMENTS,
    EXP_AVG_SQ: Kind.MOMENTS,
}


def parameter_items(case: Case) -> Iterator[Item]:
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


def optimizer_items(case: Case) -> Iterator[Item]:
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


def gradient_items(case: Case) -> Iterator[Item]:
    """Held gradients, autograd's own output on its way there, and reduction buckets.

    Several micro-batches add up in planes that live over all passes; those of a single one fill on the way
    back.
    """
    part, load, tier = case.slice, case.load, case.place.grad
    shards = part.trainable if case.place.stage < 2 else part.trainable_shards
    split = "" if case.place.stage < 2 else f" / {part.ranks} ranks"
    update = frozenset({Phase.UPDATE})
    held = update | (TRAINED if load.accumulation > 1 else frozenset({Phase.BACKWARD_END}))
    own = tier == DEVICE and load.itemsize == load.grad_bytes and case.place.stage < 2
    on_files = nvme_bytes(shards, {"grad": load.grad_bytes}, generations=1) if tier == NVME else 0
    nbytes = on_files or case.held_gradients() * load.grad_bytes
    formula = f"{load.grad_bytes} B x trainable{split}"
    if case.early_update:
        formula = f"{load.grad_bytes} B x (root group + two blocks): used up as they come"
    if own and load.accumulation == 1:
        # Autograd's output is the held gradient itself: the last block's comes as its activations go, that of
        # position tables and their like after them.
        tables = part.trainable[0] - min(part.trainable[0], case.model.vocab * case.model.hidden)
        open_yet = (max(part.trainable[1:], default=0) * 2 // 3 + tables) * load.grad_bytes
        last = frozenset({Phase.BACKWARD_END})
        yield Item(tier=tier, kind=Kind.GRADIENTS, nbytes=nbytes - open_yet, phases=last, formula=formula)
        held = update
    # Files are reserved once.
    phases = ALWAYS if tier == NVME else held
    yield Item(tier=tier, kind=Kind.GRADIENTS, nbytes=nbytes, phases=phases, formula=formula)
    root, block = part.trainable[0] * load.itemsize, max(part.trainable[1:], default=0) * load.itemsize
    if case.buffers.half_gradients_kept and load.itemsize < load.grad_bytes and case.place.stage < 2:
        formula = f"{load.itemsize} B x trainable, whole until reduced"
        whole = part.trainable_numel * load.itemsize
        yield Item(tier=DEVICE, kind=Kind.GRADIENTS, nbytes=whole, phases=update | ON_THE_WAY_BACK, formula=formula)
    elif own:
        formula = f"{load.itemsize} B x (head + a third of a block: the rest comes as activations go)"
        first = frozenset({Phase.BACKWARD}) if load.accumulation == 1 else frozenset()
        nbytes = min(root, case.model.vocab * case.model.hidden * load.itemsize) + block // 3
        yield Item(tier=DEVICE, kind=Kind.IN_FLIGHT, nbytes=nbytes, phases=first, formula=formula)
    else:
        # The group in work, and the one before it that is still on its way.
        formula = f"{load.itemsize} B x (root group + two blocks in flight)"
        nbytes = root + block * min(2, len(part.trainable) - 1)
        yield Item(tier=DEVICE, kind=Kind.IN_FLIGHT, nbytes=nbytes, phases=ON_THE_WAY_BACK, formula=formula)
    yield from _buckets(case)


def _buckets(case: Case) -> Iterator[Item]:
    """Several ranks reduce whole groups: the root's bucket stays open, of the blocks' one fills and two are
    under way.

    With ``reduce_bucket`` set: so many elements, as other systems' settings say.
    """
    part, size, own = case.slice, case.load.itemsize, case.buffers
    if part.ranks < 2:
        return
    if own.reduce_bucket is not None:
        numel = min(own.reduce_bucket, part.trainable_numel) * own.bucket_count
        formula = f"{size} B x {own.bucket_count} buckets"
    else:
        numel = part.trainable[0] + sum(sorted(part.trainable[1:])[-3:])
        formula = f"{size} B x (root group + three blocks)"
    yield Item(tier=DEVICE, kind=Kind.BUCKETS, nbytes=numel * size, phases=ON_THE_WAY_BACK, formula=formula)

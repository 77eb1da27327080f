"""State that outlives a pass: parameters, optimizer planes, held gradients."""

from collections.abc import Iterator

from lamina.engine.planner.case import Case
from lamina.engine.planner.items import ALWAYS, ON_THE_WAY_BACK, TRAINED, Item, Kind, Phase
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    PARAM,
    REMAINDER,
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
        nbytes = sum(s.shard_bytes(size) * (copies if s.grad_itemsize else 1) for s in case.segments)
        formula = f"{size} B x trainable / {part.ranks} ranks x {copies} generations + frozen once"
    else:
        nbytes = sum(segment.home_bytes for segment in case.segments)
        split = f" / {part.ranks} ranks" if case.place.stage == 3 else ""
        formula = f"{size} B x {part.numel}{split}"
    yield Item(tier=tier, kind=Kind.PARAMETERS, nbytes=nbytes, phases=ALWAYS, formula=formula)


def optimizer_items(case: Case) -> Iterator[Item]:
    part, load, tier = case.slice, case.load, case.place.optimizer
    trained = [segment for segment in case.segments if segment.grad_itemsize]
    split = "" if case.place.stage == 0 else f" / {part.ranks} ranks"
    copies = case.buffers.generations + case.buffers.checkpoints_kept
    for plane, size in case.planes.items():
        if plane in case.own_planes or (plane == PARAM and not case.param_copy):
            continue
        nbytes, formula = sum(s.shard_bytes(size) for s in trained), f"{plane}: {size} B x trainable{split}"
        if tier == NVME:
            nbytes, formula = nbytes * copies, f"{formula} x {copies} generations"
        yield Item(tier=tier, kind=_PLANE_KIND[plane], nbytes=nbytes, phases=ALWAYS, formula=formula)
    # Torch makes its tensors on the device of the masters, which here is the host's memory.
    where = DEVICE if tier == DEVICE and not case.machine.shared_memory else HOST
    nbytes, formula = sum(s.own_state_bytes for s in trained), f"{load.optimizer}'s own tensors: 4 B x trainable{split}"
    yield Item(tier=where, kind=Kind.MOMENTS, nbytes=nbytes, phases=ALWAYS, formula=formula)


def gradient_items(case: Case) -> Iterator[Item]:
    """Held gradients, autograd's own output on its way there, and reduction buckets.

    Several micro-batches add up in planes that live over all passes; those of a single one fill on the way
    back.
    """
    if case.place.grad == DEVICE:
        yield from _device_gradients(case)
    else:
        yield from _host_gradients(case)
    yield from _buckets(case)


def _host_gradients(case: Case) -> Iterator[Item]:
    """As the engine keeps them: this rank's shards in host memory, those that it cannot hold in a scratch file."""
    part, load, needs = case.slice, case.load, case.needs
    split = "" if case.place.stage == 0 else f" / {part.ranks} ranks"
    formula = f"{load.grad_bytes} B x trainable{split}"
    if needs.spill:
        scratch = f"{formula}: a place for each in a scratch file"
        yield Item(tier=NVME, kind=Kind.GRADIENTS, nbytes=needs.scratch_bytes(), phases=ALWAYS, formula=scratch)
        formula = f"{load.grad_bytes} B x the two largest shards, the others in the scratch file"
    elif case.early_update:
        formula = f"{load.grad_bytes} B x (root group + two blocks): used up as they come"
    last = frozenset({Phase.BACKWARD_END, Phase.UPDATE})
    held = last | TRAINED if load.accumulation > 1 else last
    yield Item(tier=HOST, kind=Kind.GRADIENTS, nbytes=needs.gradient_bytes(), phases=held, formula=formula)
    copies, formula = (
        sum(s.own_gradient_bytes for s in case.segments),
        "4 B x trainable: torch's optimizer gets them in fp32",
    )
    yield Item(tier=HOST, kind=Kind.GRADIENTS, nbytes=copies, phases=frozenset({Phase.UPDATE}), formula=formula)
    yield _in_flight(case)


def _device_gradients(case: Case) -> Iterator[Item]:
    """Beside an optimizer on a GPU, as other systems keep them: whole below stage 2."""
    part, load, tier = case.slice, case.load, DEVICE
    shards = part.trainable if case.place.stage < 2 else part.trainable_shards
    split = "" if case.place.stage < 2 else f" / {part.ranks} ranks"
    update = frozenset({Phase.UPDATE})
    held = update | (TRAINED if load.accumulation > 1 else frozenset({Phase.BACKWARD_END}))
    own = load.itemsize == load.grad_bytes and case.place.stage < 2
    nbytes = sum(shards) * load.grad_bytes
    formula = f"{load.grad_bytes} B x trainable{split}"
    if own and load.accumulation == 1:
        # Autograd's output is the held gradient itself: the last block's comes as its activations go, that of
        # position tables and their like after them.
        tables = part.trainable_outside - min(part.trainable_outside, case.model.vocab * case.model.hidden)
        open_yet = (max(part.trainable_blocks, default=0) * 2 // 3 + tables) * load.grad_bytes
        last = frozenset({Phase.BACKWARD_END})
        yield Item(tier=tier, kind=Kind.GRADIENTS, nbytes=nbytes - open_yet, phases=last, formula=formula)
        held = update
    yield Item(tier=tier, kind=Kind.GRADIENTS, nbytes=nbytes, phases=held, formula=formula)
    root, block = part.trainable_outside * load.itemsize, max(part.trainable_blocks, default=0) * load.itemsize
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
        yield _in_flight(case)


def _in_flight(case: Case) -> Item:
    """Autograd's own output: what is being computed and what is still on its way, single parameters where that is a copy within
    one memory, groups where a link lies between."""
    load, part, tensor = case.load, case.slice, case.place.tensor
    if case.machine.shared_memory:
        numel = 2 * min(-(-case.model.params.largest_param // tensor), max(part.trainable))
        what = "two of the largest parameters: one computed, one taken over"
    else:
        numel = part.trainable_outside + max(part.trainable_blocks, default=0) * min(2, len(part.blocks))
        what = "(all outside the blocks + two blocks in flight)"
    formula = f"{load.itemsize} B x {what}"
    return Item(tier=DEVICE, kind=Kind.IN_FLIGHT, nbytes=numel * load.itemsize, phases=ON_THE_WAY_BACK, formula=formula)


def _buckets(case: Case) -> Iterator[Item]:
    """Several ranks reduce whole groups: the root's bucket stays open, of the blocks' one fills and two are
    under way.

    With ``reduce_bucket`` set: so many elements, as other systems' settings say.
    """
    part, size, own = case.slice, case.load.itemsize, case.buffers
    if part.ranks < 2:
        return
    if own.reduce_bucket is not None:
        nbytes = min(own.reduce_bucket, part.trainable_numel) * own.bucket_count * size
        formula = f"{size} B x {own.bucket_count} buckets"
    else:
        nbytes = case.needs.bucket_bytes()
        formula = f"{size} B x (root group + three blocks)"
    yield Item(tier=DEVICE, kind=Kind.BUCKETS, nbytes=nbytes, phases=ON_THE_WAY_BACK, formula=formula)

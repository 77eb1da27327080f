"""Bytes that live within a pass or an update: windows, activations, staging buffers."""

from collections.abc import Iterator

from lamina.engine.planner.activations import ActivationBytes, activation_bytes
from lamina.engine.planner.case import Case
from lamina.engine.planner.items import ON_THE_WAY_BACK, TRAINED, Item, Kind, Phase
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import ALIGN_ELEMENTS, CHUNK_ELEMENTS, align_up


def window_numel(case: Case) -> int:
    """Elements of gathered groups: the largest ones, as many as are in use and fetched ahead at once.

    With ``max_live`` set: so many elements of blocks (the one in use at least) and the root group.
    """
    part, own = case.slice, case.buffers
    if own.max_live is None:
        return sum(sorted(part.groups, reverse=True)[: 1 + own.lookahead])
    return part.root + max(min(own.max_live, sum(part.groups[1:])), part.largest_block)


def window_items(case: Case) -> Iterator[Item]:
    if not case.gathers:
        return
    size = case.load.itemsize
    numel = window_numel(case)
    formula = f"{size} B x {numel}: the groups in use and fetched ahead"
    yield Item(tier=DEVICE, kind=Kind.WINDOW, nbytes=numel * size, phases=TRAINED, formula=formula)


def activation_items(case: Case) -> Iterator[Item]:
    """Activations at the three moments that can be the peak: the loss, the first and the last block of the
    way back."""
    place, load = case.place, case.load
    acts = activation_bytes(
        case.model,
        load,
        layers=case.slice.layers,
        tensor=place.tensor,
        in_flight=min(place.pipeline, load.accumulation),
    )
    yield from _kept(case, acts)
    formula = f"{load.tokens} tokens x vocabulary {case.model.vocab}: logits, log-probabilities, gradient"
    at_loss = frozenset({Phase.FORWARD})
    yield Item(tier=DEVICE, kind=Kind.LOGITS, nbytes=acts.logits, phases=at_loss, formula=formula)
    formula = "input and output of the last norm"
    yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.tail, phases=at_loss, formula=formula)
    formula = "gradients of activations inside of one block"
    yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.gradient, phases=ON_THE_WAY_BACK, formula=formula)
    if load.checkpoint_interval:
        formula = f"{load.checkpoint_interval} blocks computed again"
        yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.working, phases=ON_THE_WAY_BACK, formula=formula)


def _kept(case: Case, acts: ActivationBytes) -> Iterator[Item]:
    place, load = case.place, case.load
    until_back = frozenset({Phase.FORWARD, Phase.BACKWARD})
    last = frozenset({Phase.BACKWARD_END})
    if not load.checkpoint_interval:
        formula = f"{load.tokens} tokens x all that {case.slice.layers} blocks keep"
        yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.saved, phases=until_back, formula=formula)
        formula = f"{load.tokens} tokens x all that one block keeps"
        yield Item(tier=DEVICE, kind=Kind.ACTIVATIONS, nbytes=acts.block, phases=last, formula=formula)
        return
    stream = load.tokens * case.model.hidden * load.itemsize
    formula = f"{load.itemsize} B x {load.tokens} tokens x hidden x blocks / interval"
    where = place.activations
    # Files and host memory for checkpoints are reserved once; autograd frees its own as it goes.
    kept = TRAINED if where != DEVICE else until_back
    yield Item(tier=where, kind=Kind.CHECKPOINTS, nbytes=acts.saved, phases=kept, formula=formula)
    if where == DEVICE:
        yield Item(tier=DEVICE, kind=Kind.CHECKPOINTS, nbytes=stream, phases=last, formula="one checkpoint left")
        return
    formula = "two activation checkpoints on their way"
    over = HOST if where == NVME else DEVICE
    yield Item(tier=over, kind=Kind.PINNED, nbytes=2 * stream, phases=TRAINED, formula=formula)


def update_sub_group(case: Case) -> int:
    """Elements that the optimizer streams at a time.

    As many as are asked for and useful, but with all buffers at most a third of the host budget, in whole
    checksum chunks and at least one. With g bytes of other state in host memory and u bytes per element in
    all buffers a budget of g + u * n leaves u * n <= g / 2.
    """
    part, own, place = case.slice, case.buffers, case.place
    others = case.held_gradients() * case.load.grad_bytes if place.grad == HOST else 0
    if place.param == HOST:
        others += sum(part.shards if part.ranks > 1 else part.groups) * case.load.itemsize
    per_element = own.update_depth * sum(case.planes.values())
    useful = align_up(max(part.trainable_shards, default=0), ALIGN_ELEMENTS)
    wanted = min(own.sub_group, others // 2 // per_element)
    return min(max(wanted // CHUNK_ELEMENTS, 1) * CHUNK_ELEMENTS, useful)


def staging_items(case: Case) -> Iterator[Item]:
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
            phases=ON_THE_WAY_BACK,
            formula="two group shards of gradients from the device",
        )
    if place.optimizer == NVME:
        per_param = sum(case.planes.values()) + (load.grad_bytes if place.grad == NVME else 0)
        sub_group = update_sub_group(case)
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

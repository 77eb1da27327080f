"""Bytes that live within a pass or an update: windows, activations, staging buffers."""

from collections.abc import Iterator

from lamina.engine.planner.activations import ActivationBytes
from lamina.engine.planner.case import Case
from lamina.engine.planner.fetch_window import window_bytes
from lamina.engine.planner.items import ON_THE_WAY_BACK, TRAINED, Item, Kind, Phase
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import ALIGN_ELEMENTS, align_up
from lamina.tiers.placement.needs import staging_bytes


def window_items(case: Case) -> Iterator[Item]:
    formula = f"{case.load.itemsize} B x the groups in use and fetched ahead"
    yield Item(tier=DEVICE, kind=Kind.WINDOW, nbytes=window_bytes(case), phases=TRAINED, formula=formula)


def activation_items(case: Case) -> Iterator[Item]:
    """Activations at the three moments that can be the peak: the loss, the first and the last block of the
    way back."""
    load = case.load
    acts = case.activations
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
    formula = f"{load.itemsize} B x {load.tokens} tokens x hidden x blocks / interval"
    where = place.activations
    # Files and host memory for checkpoints are reserved once; autograd frees its own as it goes.
    kept = TRAINED if where != DEVICE else until_back
    yield Item(tier=where, kind=Kind.CHECKPOINTS, nbytes=acts.saved, phases=kept, formula=formula)
    if where == DEVICE:
        yield Item(tier=DEVICE, kind=Kind.CHECKPOINTS, nbytes=acts.input, phases=last, formula="one checkpoint left")
        return
    if where == NVME:
        formula = "activation checkpoints on their way"
        yield Item(tier=HOST, kind=Kind.PINNED, nbytes=case.saved_input_bytes(), phases=TRAINED, formula=formula)
    formula = "the checkpoint in use"
    yield Item(tier=DEVICE, kind=Kind.CHECKPOINTS, nbytes=acts.input, phases=TRAINED, formula=formula)


def update_sub_group(case: Case) -> int:
    """Elements that the optimizer streams at a time.

    As many as are asked for and useful, but with all buffers at most a third of the host budget, in whole
    checksum chunks and at least one. With g bytes of other state in host memory and u bytes per element in
    all buffers a budget of g + u * n leaves u * n <= g / 2.
    """
    own, needs = case.buffers, case.needs
    others = sum(needs.host_items(0).values())
    per_element = own.update_depth * sum(case.planes.values())
    useful = align_up(max((s.shard_numel for s in case.segments if s.trained), default=0), ALIGN_ELEMENTS)
    chunk = case.wishes.chunk_numel
    wanted = min(own.sub_group, others // 2 // per_element)
    return min(max(wanted // chunk, 1) * chunk, useful)


def staging_items(case: Case) -> Iterator[Item]:
    own, needs = case.buffers, case.needs
    formula = "two buffers for the largest group's shard, read from nvme for the device"
    nbytes = needs.fetch_buffer_bytes()
    yield Item(tier=HOST, kind=Kind.PINNED, nbytes=nbytes, phases=TRAINED, formula=formula)
    if needs.updates_stream():
        sub_group = update_sub_group(case)
        nbytes = staging_bytes(case.segments, case.wishes, sub_group)
        formula = f"{own.update_depth} sub-groups of {sub_group} x {sum(case.planes.values())} B"
        update = frozenset({Phase.UPDATE})
        yield Item(tier=HOST, kind=Kind.PINNED, nbytes=nbytes, phases=update, formula=formula)
    yield Item(
        tier=HOST,
        kind=Kind.STAGING,
        nbytes=own.io_staging_bytes,
        phases=frozenset({Phase.SAVE, Phase.LOAD}),
        formula="state is saved and loaded in pieces",
    )

"""Read and write parameters, masters, moments and gradients by parameter, on whatever tier they live.

[Note: finding the owner] ``get_full(param, plane)`` is called with nothing but a parameter, so a weak table from
parameters to the runtime that owns them is kept here; it keeps neither alive.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lamina.tiers import Plane, Transaction

from .adam.dtypes import plane_dtype
from .groups.partition import Slot
from .groups.segment import Segment
from .groups.shard_planes import is_stored, read_elements, start_writing, write_in_memory

if TYPE_CHECKING:
    from .runtime import ZeroRuntime

_owners: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()
_gathered: "WeakTensorKeyDictionary" = (
    WeakTensorKeyDictionary()
)  # parameters that are whole in a GatheredParameters block


@dataclass(frozen=True)
class Place:
    """Where a parameter is kept: its runtime, segment and slot."""

    runtime: "ZeroRuntime"
    segment: Segment
    index: int

    @property
    def slot(self) -> Slot:
        return self.segment.layout.slots[self.index]


def claim(runtime: "ZeroRuntime") -> None:
    """Note that the runtime owns its parameters."""
    for segment in runtime.segments:
        for index, parameter in enumerate(segment.parameters):
            _owners[parameter] = Place(runtime, segment, index)


def disclaim(runtime: "ZeroRuntime") -> None:
    for segment in runtime.segments:
        for parameter in segment.parameters:
            place = _owners.get(parameter)  # type: ignore[no-untyped-call]
            if place is not None and place.runtime is runtime:
                del _owners[parameter]


def place_of(parameter: nn.Parameter) -> Place | None:
    """Where an open engine keeps the parameter; None when none does."""
    return _owners.get(parameter)  # type: ignore[no-untyped-call, no-any-return]


def gathered_now(parameter: nn.Parameter) -> bool:
    """Whether the parameter itself is whole, inside a GatheredParameters block."""
    return parameter in _gathered


def owner_of(parameter: nn.Parameter) -> Place:
    """Raises ValueError for a parameter that no open engine owns."""
    place = _owners.get(parameter)  # type: ignore[no-untyped-call]
    if place is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no open engine: pass one of the module's own "
            f"parameters, after initialize() and before close()"
        )
    return place  # type: ignore[no-any-return]


# -- reading ---------------------------------------------------------------------------------------------------------


def get_full(parameter: nn.Parameter, plane: Plane | str = Plane.PARAM) -> torch.Tensor | None:
    """A copy of one plane of a parameter, in its shape.

    ``plane``: "param" (compute dtype), "master" (fp32), "exp_avg", "exp_avg_sq" (fp32) or "grad" (the accumulated
    gradient of this window, fp32; None when there is none). Raises ValueError for a frozen parameter's state.
    """
    place = owner_of(parameter)
    return _read(place, _plane(plane, place))


def get_local(parameter: nn.Parameter, plane: Plane | str = Plane.PARAM) -> torch.Tensor | None:
    """This rank's part of a plane, 1-d; see get_full."""
    place = owner_of(parameter)
    whole = _read(place, _plane(plane, place))
    if whole is None:
        return None
    first, last = _local_range(place)
    return whole.reshape(-1)[first:last]


def _plane(plane: Plane | str, place: Place) -> Plane:
    try:
        wanted = Plane(plane)
    except ValueError:
        raise ValueError(f"plane {plane!r}: want one of param, master, exp_avg, exp_avg_sq, grad") from None
    if wanted is Plane.REMAINDER:
        raise ValueError("plane 'remainder' is half of a master: read or write 'master'")
    if not place.segment.trainable and wanted is not Plane.PARAM:
        raise ValueError(f"{place.slot.name} is frozen: it has no {wanted}")
    if place.segment.client and wanted in (Plane.EXP_AVG, Plane.EXP_AVG_SQ):
        raise ValueError(f"{place.slot.name} is updated by an optimizer of torch: look for {wanted} in its own state")
    return wanted


def _local_range(place: Place) -> tuple[int, int]:
    """This rank's elements of the parameter, counted from its first."""
    begin, end = place.segment.layout.shard_range(place.segment.rank)
    slot = place.slot
    return max(slot.offset, begin) - slot.offset, max(min(slot.end, end), slot.offset) - slot.offset


def _read(place: Place, plane: Plane) -> torch.Tensor | None:
    segment = place.segment
    if plane is Plane.GRAD:
        gradients = place.runtime.gradients[segment]
        if place.index not in gradients.arrived:
            return None
        return _whole(place, gradients.piece(place.index).float())
    if plane is Plane.MASTER and not segment.has_plane(Plane.MASTER):
        high = _read_plane(place, Plane.PARAM)
        if segment.dtype is torch.float32:
            return high
        return _joined(place, high, _read_plane(place, Plane.REMAINDER))
    return _read_plane(place, plane)


def _read_plane(place: Place, plane: Plane) -> torch.Tensor:
    """A copy of a stored plane of the whole parameter."""
    first, last = _shard_range(place)
    runtime = place.runtime
    runtime.soundness.refuse_mixture(f"reading {place.slot.name}")
    # An early update has put the coming step's values where memory holds a copy of what the store has.
    ahead = runtime.optimizer is not None and runtime.optimizer.started_early(place.segment)
    with runtime.soundness.meeting_lost_commit():
        piece = read_elements(place.segment, plane, first, last, runtime.store, committed=ahead)
    return _whole(place, piece)


def _shard_range(place: Place) -> tuple[int, int]:
    """This rank's elements of the parameter, counted from the start of its shard; empty when it has none."""
    begin, end = place.segment.layout.shard_range(place.segment.rank)
    first, last = max(place.slot.offset, begin), min(place.slot.end, end)
    return (first - begin, last - begin) if first < last else (0, 0)


def _whole(place: Place, piece: torch.Tensor) -> torch.Tensor:
    """The whole parameter's values, in its shape, from every rank's piece. Collective when there are several ranks."""
    if place.segment.layout.world_size == 1:
        return piece.view(place.slot.shape)
    whole = torch.zeros(place.slot.numel, dtype=piece.dtype)
    first, last = _local_range(place)
    if first < last:
        whole[first:last] = piece
    place.runtime.ranks.sum_bits(whole)
    return whole.view(place.slot.shape)


def _joined(place: Place, high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """fp32 masters from their bf16 half and the remainder."""
    master = torch.empty(high.shape, dtype=torch.float32)
    place.runtime.kernels.merge_bf16(
        master.numel(), param=high.data_ptr(), remainder=remainder.data_ptr(), master=master.data_ptr()
    )
    return master


def _split(place: Place, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 half and the remainder of fp32 masters."""
    master = master.contiguous()
    high = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = torch.empty(master.shape, dtype=torch.int16)
    place.runtime.kernels.split_bf16(
        master.numel(), master=master.data_ptr(), param=high.data_ptr(), remainder=remainder.data_ptr()
    )
    return high, remainder


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """New values for one plane of one parameter."""

    place: Place
    plane: Plane
    values: torch.Tensor


def set_full(parameter: nn.Parameter, plane: Plane | str, values: torch.Tensor) -> None:
    """Replace one plane of a parameter. "param" and "master" both set the fp32 master and the compute-dtype parameter.

    Raises ValueError for another shape, RuntimeError while an update is under way (between backward and step, where
    updates start early; a gradient may be set then).
    """
    place = owner_of(parameter)
    _apply([Edit(place, _plane(plane, place), _checked(place, values))])


def set_local(parameter: nn.Parameter, plane: Plane | str, values: torch.Tensor) -> None:
    """Replace this rank's part of a plane (1-d, as get_local returns it)."""
    place = owner_of(parameter)
    wanted = _plane(plane, place)
    whole = _read(place, wanted)
    if whole is None:
        raise RuntimeError(f"{place.slot.name} has no gradient in this window")
    first, last = _local_range(place)
    if values.numel() != last - first:
        raise ValueError(f"{place.slot.name}: this rank has {last - first} elements, got {values.numel()}")
    flat = whole.reshape(-1).clone()
    flat[first:last] = values.reshape(-1).to(flat.dtype)
    _apply([Edit(place, wanted, flat.view(place.slot.shape))])


def _checked(place: Place, values: torch.Tensor) -> torch.Tensor:
    if tuple(values.shape) != place.slot.shape:
        raise ValueError(f"{place.slot.name} has shape {place.slot.shape}, got values of shape {tuple(values.shape)}")
    return values.detach()


def _apply(edits: Sequence[Edit]) -> None:
    """Apply edits of one or several runtimes; NVMe-resident planes of one runtime go into one new generation."""
    for runtime in {id(edit.place.runtime): edit.place.runtime for edit in edits}.values():
        _apply_to(runtime, [edit for edit in edits if edit.place.runtime is runtime])


def _apply_to(runtime: "ZeroRuntime", edits: Sequence[Edit]) -> None:
    runtime.soundness.refuse("writing state", uncommitted=True)  # before anything is changed
    stored: list[tuple[Place, Plane, torch.Tensor]] = []
    changed = [edit.place.segment for edit in edits if edit.plane in (Plane.PARAM, Plane.MASTER)]
    if fetched := {segment.group for segment in changed if not segment.in_place}:
        runtime.executor.committed(fetched, frozenset())
    for edit in edits:
        segment, slot = edit.place.segment, edit.place.slot
        if edit.plane is Plane.GRAD:
            plane = runtime.gradients[segment]
            if edit.place.index not in plane.arrived:
                raise RuntimeError(
                    f"{slot.name} has no gradient in this window, or it was already used up by an early update"
                )
            plane.piece(edit.place.index).copy_(_piece(edit.place, edit.values))
            plane.edited = True
            continue
        for plane_kind, values in _planes_of(edit):
            first, _ = _shard_range(edit.place)
            write_in_memory(segment, plane_kind, first, _piece(edit.place, values))
            if is_stored(segment, plane_kind):
                stored.append((edit.place, plane_kind, values))
    if stored:
        _store(runtime, stored)
    for segment in {id(e.place.segment): e.place.segment for e in edits if e.plane is not Plane.GRAD}.values():
        if segment.replicated and segment.flat is not None and segment.layout.world_size > 1:
            runtime.ranks.all_gather(segment.flat)


def _piece(place: Place, values: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole parameter's values, 1-d."""
    first, last = _local_range(place)
    return values.reshape(-1)[first:last] if first < last else values.reshape(-1)[:0]


def _planes_of(edit: Edit) -> Iterator[tuple[Plane, torch.Tensor]]:
    """The stored planes that an edit changes."""
    segment = edit.place.segment
    if edit.plane not in (Plane.PARAM, Plane.MASTER) or not segment.trainable:
        yield edit.plane, edit.values.to(plane_dtype(edit.plane, segment.dtype))
        return
    if segment.has_plane(Plane.REMAINDER):
        high, remainder = _split(edit.place, edit.values.float())
        yield Plane.PARAM, high
        yield Plane.REMAINDER, remainder
        return
    yield Plane.PARAM, edit.values.to(segment.dtype)
    if segment.has_plane(Plane.MASTER):
        yield Plane.MASTER, edit.values.float()


def _store(runtime: "ZeroRuntime", edits: Sequence[tuple[Place, Plane, torch.Tensor]]) -> None:
    """Write edited planes into a new generation, everything else carried over, and commit it for the same step.

    Frozen planes lie in files of their own, which no transaction writes twice: an edit of one makes new ones of all.
    """
    store = runtime.store
    if store is None or store.current is None:
        raise RuntimeError("there is no store to write to")
    if runtime.optimizer is not None and runtime.optimizer.updating:
        raise RuntimeError(
            "state cannot be written between backward() and step() while updates start early: call step() first"
        )
    runtime.executor.invalidate()
    current = store.current
    frozen_too = any(not place.segment.trainable for place, _, _ in edits)
    planes: dict[tuple[Segment, Plane], list[tuple[Place, torch.Tensor]]] = {}
    if frozen_too:
        frozen = [segment for segment in runtime.segments if not segment.trainable]
        planes = {(segment, spec.plane): [] for segment in frozen for spec in segment.stored_planes}
    for place, plane, values in edits:
        planes.setdefault((place.segment, plane), []).append((place, values))
    transaction = store.begin(replace_frozen=frozen_too)
    try:
        for (segment, plane), members in planes.items():
            _rewrite_plane(runtime, transaction, segment, plane, members)
        transaction.copy_rest()
        transaction.commit(current.step, current.meta)
    except BaseException:
        transaction.abort()
        raise


def _rewrite_plane(
    runtime: "ZeroRuntime",
    transaction: Transaction,
    segment: Segment,
    plane: Plane,
    members: Sequence[tuple[Place, torch.Tensor]],
) -> None:
    """Read what the store has of a segment's plane, put the new values in, write it."""
    kept, numel = segment.kept, segment.layout.shard_numel
    flat = read_elements(segment, plane, kept, numel, runtime.store, committed=True)
    for place, values in members:
        first, last = _shard_range(place)
        begin = max(first, kept)
        if begin < last:
            flat[begin - kept : last - kept] = _piece(place, values)[begin - first :]
    for handle in start_writing(transaction, segment, plane, kept, flat):
        handle.wait()


# -- gathering -------------------------------------------------------------------------------------------------------


@contextmanager
def GatheredParameters(
    parameters: nn.Parameter | Iterable[nn.Parameter] | nn.Module, modifier_rank: int | None = None
) -> Iterator[None]:
    """Whole parameters inside the block, wherever they live; edits are kept when ``modifier_rank`` names a rank.

    What that rank has at the end of the block counts on all ranks, whether they made the same edit or none; the end is then
    collective. Raises ValueError for a rank that is not there, and RuntimeError at the end of the block when a parameter was
    changed and there is no modifier: an edit is kept or refused, never lost.
    """
    if isinstance(parameters, nn.Module):
        listed = list(parameters.parameters())
    elif isinstance(parameters, nn.Parameter):
        listed = [parameters]
    else:
        listed = list(parameters)
    places = [owner_of(parameter) for parameter in listed]
    if modifier_rank is not None:
        _require_rank(modifier_rank, places)
    before: list[torch.Tensor] = []
    for parameter, place in zip(listed, places, strict=True):
        values = _read_plane(place, Plane.PARAM)
        before.append(values)
        parameter.data = values.clone()
        _gathered[parameter] = True
    try:
        yield
        after = [parameter.detach().clone() for parameter in listed]
    finally:
        for parameter, place in zip(listed, places, strict=True):
            _gathered.pop(parameter, None)  # type: ignore[no-untyped-call]
            _rebind(parameter, place)
    changed = [not _same_bits(new, old) for new, old in zip(after, before, strict=True)]
    if modifier_rank is not None:
        _apply(list(_edits_of(modifier_rank, places, after, changed)))
    elif any(changed):
        names = ", ".join(place.slot.name for place, flag in zip(places, changed, strict=True) if flag)
        raise RuntimeError(
            f"changed inside GatheredParameters without a writer: {names}. Pass modifier_rank=0 to keep edits"
        )


def _require_rank(rank: int, places: Sequence[Place]) -> None:
    for world_size in {place.runtime.ranks.world_size for place in places}:
        if not 0 <= rank < world_size:
            raise ValueError(f"modifier_rank is {rank}: want a rank from 0 to {world_size - 1}, or None to read only")


def _edits_of(
    rank: int, places: Sequence[Place], values: Sequence[torch.Tensor], changed: Sequence[bool]
) -> Iterator[Edit]:
    """What was changed on any rank, with the values that ``rank`` has. Collective."""
    for place, new, flag in zip(places, values, changed, strict=True):
        ranks = place.runtime.ranks
        (wanted,) = ranks.union([flag], "agreeing on what was edited in GatheredParameters")
        if wanted:
            ranks.broadcast(new, source=rank)
            yield Edit(place, Plane.PARAM, new)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return (
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        if left.dim()
        else bool(torch.equal(left.reshape(1).view(torch.uint8), right.reshape(1).view(torch.uint8)))
    )


def _rebind(parameter: nn.Parameter, place: Place) -> None:
    """Give the parameter back what it had outside the block: home memory, a fetched copy or a placeholder."""
    segment, slot = place.segment, place.slot
    if segment.flat is not None:
        parameter.data = segment.flat[slot.offset : slot.end].view(slot.shape)
    else:
        parameter.data = torch.full((), float("nan"), dtype=segment.dtype).expand(slot.shape)

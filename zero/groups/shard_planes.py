"""Elements of a plane of this rank's shard: the front may lie in memory, the others in the store, or all in one of them."""

import torch

from lamina.tiers import GenerationStore, Plane, Transaction, TransferHandle
from lamina.zero.adam.dtypes import plane_dtype

from .segment import Segment


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as writable bytes; the tensor is 1-d, contiguous and on the CPU."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def is_stored(segment: Segment, plane: Plane) -> bool:
    """Whether the store has elements of a plane (all from ``segment.kept`` on)."""
    return any(spec.plane is plane for spec in segment.stored_planes)


def plane_in_memory(segment: Segment, plane: Plane) -> torch.Tensor | None:
    """This rank's shard of a plane where it is at home in memory, or as much of its front as is; not a copy."""
    return next(iter(planes_in_memory(segment, plane)), None)


def planes_in_memory(segment: Segment, plane: Plane) -> list[torch.Tensor]:
    """Every place in memory that holds this rank's shard of a plane or its front, those that the CPU can reach first."""
    dtype = plane_dtype(plane, segment.dtype)
    views = []
    if plane is Plane.PARAM and segment.home is not None:
        views.append(segment.home_shard())
    if plane in segment.state:
        views.append(segment.state[plane].view)
    found = [torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype) for view in views]
    if plane is Plane.PARAM and segment.device_home is not None and segment.flat is not None:
        found.append(segment.shard_of(segment.flat))
    return found


def read_elements(
    segment: Segment,
    plane: Plane,
    first: int,
    last: int,
    store: GenerationStore | None,
    *,
    committed: bool = False,
) -> torch.Tensor:
    """A copy of elements [first, last) of this rank's shard, on the CPU.

    ``committed``: what the store has is taken from its current generation, though memory may have a copy, which is ahead.
    """
    dtype = plane_dtype(plane, segment.dtype)
    memory = plane_in_memory(segment, plane)
    available = 0 if memory is None else memory.numel()
    if committed and is_stored(segment, plane):
        available = min(available, segment.kept)
    border = max(first, min(last, available))
    values = torch.empty(last - first, dtype=dtype)
    if memory is not None:
        values[: border - first].copy_(memory[first:border])
    if border < last:
        if store is None:
            raise RuntimeError(f"{segment.name} has no {plane} in memory and there is no store")
        where = border * dtype.itemsize
        store.read(segment.name, plane, bytes_of(values[border - first :]), offset=where).wait()
    return values


def write_in_memory(segment: Segment, plane: Plane, first: int, values: torch.Tensor) -> None:
    """Replace elements from ``first`` on in every place in memory, as far as it has them."""
    for memory in planes_in_memory(segment, plane):
        into = memory[first : first + values.numel()]
        if into.numel() and into.data_ptr() != values.data_ptr():
            into.copy_(values[: into.numel()])


def start_writing(
    transaction: Transaction, segment: Segment, plane: Plane, first: int, values: torch.Tensor
) -> list[TransferHandle]:
    """Begin to write elements from ``first`` on to the next generation, those that the store has; ``values`` are on the CPU."""
    begin = max(first, segment.kept)
    part = values[begin - first :]
    if not is_stored(segment, plane) or not part.numel():
        return []
    return [transaction.write(segment.name, plane, bytes_of(part), offset=begin * part.itemsize)]

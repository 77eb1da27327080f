"""Saves and loads one rank's tiered state: NVMe-resident planes are pinned, planes in memory written to one file."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lamina.aio_native import AsyncIO
from lamina.tiers import Plane
from lamina.tiers.nvme.pin import PinnedGeneration
from lamina.zero.adam.dtypes import plane_dtype
from lamina.zero.groups.segment import Segment
from lamina.zero.groups.shard_planes import bytes_of, plane_in_memory, write_in_memory
from lamina.zero.step.client_optimizer import ClientOptimizer

from .client_state import ClientStateSource
from .planes_file import Extent, write_planes
from .record import ClientTensor, RankRecord, SegmentRecord
from .source import PINNED_FOLDER, PLANE_FILE, CheckpointSource, RankPart, StateSource
from .target import StateWriter, check_source, refresh_homes, refresh_replicas

if TYPE_CHECKING:
    from lamina.zero.runtime import ZeroRuntime


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """What a load found: parameters here that the checkpoint lacks, and the other way round; the way it was read."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    as_saved: bool  # True: planes were taken over as they lay, NVMe files linked


def rank_records(runtime: "ZeroRuntime") -> list[SegmentRecord]:
    """What this rank would save now."""
    found = []
    for segment in runtime.segments:
        gradients = runtime.gradients[segment] if segment.trainable else None
        found.append(
            SegmentRecord.of(
                segment,
                gradients.dtype if gradients is not None else segment.dtype,
                gradients.arrived if gradients is not None else set(),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class CapturedState:
    """What a save took hold of: from now on training may change everything. ``record`` describes the files; ``path``: that of
    the planes in memory."""

    record: RankRecord
    path: str
    pin: PinnedGeneration | None

    def wait(self) -> None:
        """Return once the pinned part is complete and durable. Raises OSError, StoreError."""
        if self.pin is not None:
            self.pin.wait()

    def drain(self) -> None:
        """Wait for it, however it ends."""
        if self.pin is not None:
            self.pin.finish()


def capture_rank(runtime: "ZeroRuntime", folder: str) -> CapturedState:
    """Write this rank's part into a folder that exists and is empty; it is complete and durable after ``sync_all`` of the
    planes' path and ``wait()``.

    NVMe-resident planes are pinned: on the same file system no byte is copied, elsewhere they are copied in the background.
    Raises RuntimeError between ``backward()`` and ``step()`` where updates start early, OSError and StoreError.
    """
    if runtime.optimizer is not None and runtime.optimizer.updating:
        raise RuntimeError("an update is under way: call step() before saving a checkpoint")
    segments = rank_records(runtime)
    has_pinned = any(segment.pinned for segment in segments)
    pin = None
    if has_pinned and runtime.store is not None:
        pin = runtime.store.pin(os.path.join(folder, PINNED_FOLDER), background=True)
    try:
        client, extents = _write_memory(runtime, segments, os.path.join(folder, PLANE_FILE))
    except BaseException:
        if pin is not None:
            pin.finish()
        raise
    record = RankRecord(segments=tuple(segments), extents=tuple(extents), has_pinned=has_pinned, client=tuple(client))
    return CapturedState(record=record, path=os.path.join(folder, PLANE_FILE), pin=pin)


def _write_memory(
    runtime: "ZeroRuntime", segments: Sequence[SegmentRecord], path: str
) -> tuple[list[ClientTensor], list[Extent]]:
    """What memory holds, and the state of a client optimizer."""
    planes = _planes_in_memory(runtime, segments)
    client = []
    if isinstance(runtime.optimizer, ClientOptimizer):
        for (name, key), tensor in runtime.optimizer.state_tensors().items():
            record = ClientTensor(parameter=name, key=key, dtype=tensor.dtype, shape=tuple(tensor.shape))
            client.append(record)
            values = tensor.detach().cpu().contiguous().reshape(-1)
            planes.append((name, record.plane, bytes_of(values) if values.numel() else memoryview(b"")))
    with ExitStack() as stack:
        io = runtime.io or stack.enter_context(runtime.options.open_io())
        return client, write_planes(io, path, planes)


def _planes_in_memory(runtime: "ZeroRuntime", records: Sequence[SegmentRecord]) -> list[tuple[str, str, memoryview]]:
    return [
        (segment.name, plane, _view(runtime, segment, Plane(plane)))
        for segment, record in zip(runtime.segments, records, strict=True)
        for plane in record.planes_in_file
    ]


def _view(runtime: "ZeroRuntime", segment: Segment, plane: Plane) -> memoryview:
    """The bytes of this rank's shard of a plane that only memory has; a copy where only an accelerator has them."""
    values = runtime.gradients[segment].flat if plane is Plane.GRAD else plane_in_memory(segment, plane)
    if values is None:
        raise RuntimeError(f"{segment.name} has no {plane} in memory")
    if segment.kept and plane is not Plane.GRAD:
        values = values[: segment.kept]
    values = values.detach().cpu()
    return bytes_of(values) if values.numel() else memoryview(bytearray())


def load_rank(
    runtime: "ZeroRuntime",
    folders: Sequence[str],
    records: Sequence[RankRecord],
    *,
    step: int,
    meta: dict[str, object],
    strict: bool = True,
    moments: bool = True,
    gradients: bool = True,
    client_values: Mapping[str, Mapping[str, Any]] | None = None,
) -> LoadedState:
    """Load this rank's state from all ranks' parts (folder and record of each).

    Where this rank's part has the very shards that are wanted, NVMe-resident planes are linked and the others read as they
    are; anything else is read by parameter, only the ranges needed. Raises KeyError naming parameters that differ
    (``strict``), ValueError for shapes that differ, IntegrityError for damage.
    """
    with ExitStack() as stack:
        io = runtime.io or stack.enter_context(runtime.options.open_io())
        source = stack.enter_context(CheckpointSource(folders, records, io, runtime.kernels))
        missing = check_source(runtime, source)
        here = {slot.name for segment in runtime.segments for slot in segment.layout.slots}
        unexpected = sorted(source.names() - here)
        if strict and (missing or unexpected):
            said = [f"not in the checkpoint: {', '.join(missing)}"] if missing else []
            said += [f"not in the model: {', '.join(unexpected)}"] if unexpected else []
            raise KeyError(f"{'; '.join(said)} (strict=False loads the rest)")
        client = runtime.optimizer if moments and isinstance(runtime.optimizer, ClientOptimizer) else None
        own_part = min(runtime.ranks.rank, len(records) - 1)
        part = _same_part(runtime, source)
        as_it_was = _same_shards(runtime, source)
        if client is not None and as_it_was:
            client.check_state({(t.parameter, t.key): torch.Size(t.shape).numel() for t in records[own_part].client})
        elif client is not None:
            ClientStateSource(source).check(client)
        if part is not None and moments:
            _take_over(runtime, part, io)
        else:
            StateWriter(runtime, source, moments=moments).write(step=step, meta=meta)
        _load_gradients(runtime, source if gradients else None)
        if client is not None:
            state = ClientStateSource(source)
            client.load_state(state.as_saved(own_part) if as_it_was else state.tensors(client), client_values or {})
    return LoadedState(missing=tuple(missing), unexpected=tuple(unexpected), as_saved=part is not None and moments)


def _same_shards(runtime: "ZeroRuntime", source: CheckpointSource) -> bool:
    """Whether every rank has the very part of each parameter that it had when it was saved."""
    if len(source.parts) != runtime.ranks.world_size:
        return False
    saved = source.parts[runtime.ranks.rank].record.segments
    wanted = rank_records(runtime)
    return len(wanted) == len(saved) and all(
        mine.same_shard(theirs) for mine, theirs in zip(wanted, saved, strict=True)
    )


def _same_part(runtime: "ZeroRuntime", source: CheckpointSource) -> RankPart | None:
    """This rank's own part, when its shards are those wanted here and NVMe holds the same planes."""
    if len(source.parts) != runtime.ranks.world_size:
        return None
    part = source.parts[runtime.ranks.rank]
    wanted = rank_records(runtime)
    if len(wanted) != len(part.record.segments):
        return None
    same = all(
        mine.same_shard(theirs) and (mine.pinned, mine.kept) == (theirs.pinned, theirs.kept)
        for mine, theirs in zip(wanted, part.record.segments, strict=True)
    )
    if same and part.record.has_pinned and runtime.store is not None:
        same = part.pinned().shards == runtime.store.shards
    return part if same else None


def _take_over(runtime: "ZeroRuntime", part: RankPart, io: AsyncIO) -> None:
    """Planes in memory first: when one of them is damaged, NVMe-resident state is still the old."""
    part.file()  # raises when it is missing, also where nothing is to be read from it
    for segment, record in zip(runtime.segments, part.record.segments, strict=True):
        for plane in map(Plane, record.planes_in_file):
            if plane is Plane.GRAD:
                continue
            view = _view(runtime, segment, plane)
            part.read(segment.name, str(plane), 0, view)
            if len(view):
                values = torch.frombuffer(view, dtype=plane_dtype(plane, segment.dtype))
                write_in_memory(segment, plane, 0, values)
    if part.record.has_pinned and runtime.store is not None:
        runtime.store.restore(part.pinned_folder)
        refresh_homes(runtime)
    else:
        refresh_replicas(runtime)


def _load_gradients(runtime: "ZeroRuntime", source: CheckpointSource | None) -> None:
    """Put the open window's gradients back; without a source the window is empty."""
    runtime.gradients.release_all()
    if source is None:
        return
    for segment in runtime.segments:
        if not segment.trainable:
            continue
        pieces = {index: (first, last) for index, first, last in segment.layout.pieces(segment.rank)}
        begin = segment.layout.shard_range(segment.rank)[0]
        for index, slot in enumerate(segment.layout.slots):
            first, last = pieces.get(index, (0, 0))
            within = (begin + first - slot.offset, begin + last - slot.offset) if first < last else (0, 0)
            values = source.gradient(slot.name, *within) if source.has(slot.name) else None
            if values is None:
                continue
            plane = runtime.gradients.make_present(segment)
            plane.piece(index).copy_(values)
            plane.arrived.add(index)


def load_source(runtime: "ZeroRuntime", source: StateSource, *, step: int, strict: bool) -> LoadedState:
    """Take parameter values from any source; moments and gradients stay. Raises KeyError (strict), ValueError (shapes)."""
    missing = check_source(runtime, source)
    if strict and missing:
        raise KeyError(f"not there: {', '.join(missing)} (strict=False loads the rest)")
    meta = dict(runtime.store.current.meta) if runtime.store is not None and runtime.store.current is not None else {}
    StateWriter(runtime, source, moments=False).write(step=step, meta=meta)
    return LoadedState(missing=tuple(missing), unexpected=(), as_saved=False)

"""Writes state into a runtime by parameter, chunk by chunk, whatever the placement: for checkpoints and imported weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lamina.tiers import Plane, Transaction
from lamina.zero.adam.dtypes import plane_dtype
from lamina.zero.groups.segment import Segment
from lamina.zero.groups.shard_planes import is_stored, planes_in_memory, read_elements, start_writing, write_in_memory

from .source import StateSource

if TYPE_CHECKING:
    from lamina.zero.runtime import ZeroRuntime

CHUNK_NUMEL = 1 << 20
MOMENTS = (Plane.EXP_AVG, Plane.EXP_AVG_SQ)


@dataclass(frozen=True)
class _Piece:
    """Elements [first, last) of a parameter that lie at ``begin`` of a chunk."""

    name: str
    first: int
    last: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.last - self.first


def check_source(runtime: "ZeroRuntime", source: StateSource) -> list[str]:
    """Names of parameters that the source lacks. Raises ValueError, naming all, for shapes that differ."""
    missing, wrong = [], []
    for segment in runtime.segments:
        for slot in segment.layout.slots:
            if not source.has(slot.name):
                missing.append(slot.name)
            elif source.shape(slot.name) != slot.shape:
                wrong.append(f"{slot.name} has shape {slot.shape} here and {source.shape(slot.name)} there")
    if wrong:
        raise ValueError("; ".join(wrong))
    return missing


class StateWriter:
    """Writes a source's values over this rank's state; parameters that it lacks keep theirs.

    NVMe-resident planes go into the next generation, which counts when ``write`` returns. ``moments``: write those, too.
    """

    def __init__(self, runtime: "ZeroRuntime", source: StateSource, *, moments: bool) -> None:
        self._runtime = runtime
        self._source = source
        self._moments = moments

    def write(self, *, step: int, meta: dict[str, object]) -> None:
        """Raises what reading the source raises; NVMe-resident state is then as it was."""
        runtime = self._runtime
        store = runtime.store
        transaction = None
        runtime.executor.invalidate()
        if store is not None:
            frozen = any(segment.stored_planes for segment in runtime.segments if not segment.trainable)
            transaction = store.begin(replace_frozen=frozen)
        try:
            for segment in runtime.segments:
                for begin in range(0, segment.layout.shard_numel, CHUNK_NUMEL):
                    count = min(CHUNK_NUMEL, segment.layout.shard_numel - begin)
                    self._write_chunk(segment, begin, count, transaction)
            if transaction is not None:
                transaction.copy_rest()
                transaction.commit(step, meta)
        except BaseException:
            if transaction is not None:
                transaction.abort()
            raise
        refresh_replicas(runtime)

    def _write_chunk(self, segment: Segment, begin: int, count: int, transaction: Transaction | None) -> None:
        pieces = _pieces(segment, begin, count)
        missing = any(not self._source.has(piece.name) for piece in pieces)
        planes = self._primary(segment, begin, count, pieces, keep=missing)
        if self._moments and segment.trainable:
            planes |= self._both_moments(segment, begin, count, pieces)
        handles = []
        for plane, values in planes.items():
            write_in_memory(segment, plane, begin, values)
            if transaction is not None:
                handles += start_writing(transaction, segment, plane, begin, values)
        for handle in handles:
            handle.wait()

    def _primary(
        self, segment: Segment, begin: int, count: int, pieces: Sequence[_Piece], *, keep: bool
    ) -> dict[Plane, torch.Tensor]:
        """The planes that hold the parameter's value. ``keep``: some of it stays as it is."""
        if not segment.trainable:
            param = self._old(segment, Plane.PARAM, begin, count, keep)
            self._fill(param, pieces)
            return {Plane.PARAM: param}
        kernels = self._runtime.kernels
        if segment.has_plane(Plane.REMAINDER):
            param = self._old(segment, Plane.PARAM, begin, count, keep)
            remainder = self._old(segment, Plane.REMAINDER, begin, count, keep)
            master = torch.zeros(count, dtype=torch.float32)
            if keep:
                kernels.merge_bf16(
                    count, param=param.data_ptr(), remainder=remainder.data_ptr(), master=master.data_ptr()
                )
            self._fill(master, pieces)
            kernels.split_bf16(count, master=master.data_ptr(), param=param.data_ptr(), remainder=remainder.data_ptr())
            return {Plane.PARAM: param, Plane.REMAINDER: remainder}
        if segment.has_plane(Plane.MASTER):
            master = self._old(segment, Plane.MASTER, begin, count, keep)
            self._fill(master, pieces)
            return {Plane.MASTER: master, Plane.PARAM: master.to(segment.dtype)}
        param = self._old(segment, Plane.PARAM, begin, count, keep)
        self._fill(param, pieces)
        return {Plane.PARAM: param}

    def _fill(self, into: torch.Tensor, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            if self._source.has(piece.name):
                into[piece.begin : piece.end].copy_(self._source.master(piece.name, piece.first, piece.last))

    def _both_moments(
        self, segment: Segment, begin: int, count: int, pieces: Sequence[_Piece]
    ) -> dict[Plane, torch.Tensor]:
        found = {}
        for plane in MOMENTS:
            if not segment.has_plane(plane):
                continue
            values = self._old(segment, plane, begin, count, keep=True)
            for piece in pieces:
                if self._source.has(piece.name):
                    new = self._source.moment(piece.name, plane, piece.first, piece.last)
                    if new is not None:
                        values[piece.begin : piece.end].copy_(new)
            found[plane] = values
        return found

    def _old(self, segment: Segment, plane: Plane, begin: int, count: int, keep: bool) -> torch.Tensor:
        """The chunk's current values when they are to be kept, else zeros."""
        if not keep:
            return torch.zeros(count, dtype=plane_dtype(plane, segment.dtype))
        return read_elements(segment, plane, begin, begin + count, self._runtime.store)


def _pieces(segment: Segment, begin: int, count: int) -> list[_Piece]:
    """What lies in elements [begin, begin + count) of this rank's shard."""
    start = segment.layout.shard_range(segment.rank)[0] + begin
    end = start + count
    found = []
    for slot in segment.layout.slots:
        first, last = max(slot.offset, start), min(slot.end, end)
        if first < last:
            found.append(_Piece(slot.name, first - slot.offset, last - slot.offset, first - start))
    return found


def refresh_replicas(runtime: "ZeroRuntime") -> None:
    """Bring the other ranks' shards into the copies that every rank keeps whole. Collective."""
    for segment in runtime.segments:
        if segment.replicated and segment.flat is not None and segment.layout.world_size > 1:
            runtime.ranks.all_gather(segment.flat)


def refresh_homes(runtime: "ZeroRuntime") -> None:
    """Read again what memory keeps of planes whose current generation is on NVMe, on every rank. Collective."""
    reread_homes(runtime)
    refresh_replicas(runtime)


def reread_homes(runtime: "ZeroRuntime") -> None:
    """The same for this rank's shards alone: the copies of the others' are right."""
    store = runtime.store
    if store is None:
        return
    runtime.executor.invalidate()
    for segment in runtime.segments:
        if not planes_in_memory(segment, Plane.PARAM) or not is_stored(segment, Plane.PARAM):
            continue
        for begin in range(segment.kept, segment.layout.shard_numel, CHUNK_NUMEL):
            end = min(begin + CHUNK_NUMEL, segment.layout.shard_numel)
            values = read_elements(segment, Plane.PARAM, begin, end, store, committed=True)
            write_in_memory(segment, Plane.PARAM, begin, values)

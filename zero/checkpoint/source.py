"""Reads a checkpoint by parameter: any range of any plane, wherever the rank that saved it kept it."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch

from lamina.aio_native import AsyncIO
from lamina.tiers import Plane
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.zero.adam.kernels import Kernels
from lamina.zero.groups.shard_planes import bytes_of

from .planes_file import PlaneFile
from .record import RankRecord, SegmentRecord, SlotRecord

PLANE_FILE = "planes.bin"
PINNED_FOLDER = "nvme"


class StateSource(Protocol):
    """Where a parameter's values come from; each tensor is 1-d, elements [first, last) of the parameter."""

    def has(self, name: str) -> bool:
        """Whether the parameter is there."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape. Raises KeyError when it is not there."""

    def master(self, name: str, first: int, last: int) -> torch.Tensor:
        """Exact values: fp32 of a trained parameter, of a frozen one its own dtype."""

    def moment(self, name: str, plane: Plane, first: int, last: int) -> torch.Tensor | None:
        """fp32 values of exp_avg or exp_avg_sq; None where the source has none."""


class RankPart:
    """One rank's folder, opened when it is first read."""

    def __init__(self, folder: str, record: RankRecord, io: AsyncIO) -> None:
        self.folder = folder
        self.record = record
        self.segments = {segment.name: segment for segment in record.segments}
        self._io = io
        self._closing = ExitStack()
        self._file: PlaneFile | None = None
        self._pinned: PinnedReader | None = None

    @property
    def pinned_folder(self) -> str:
        return os.path.join(self.folder, PINNED_FOLDER)

    def file(self) -> PlaneFile:
        if self._file is None:
            path = os.path.join(self.folder, PLANE_FILE)
            self._file = self._closing.enter_context(PlaneFile(self._io, path, self.record.extents))
        return self._file

    def pinned(self) -> PinnedReader:
        if self._pinned is None:
            self._pinned = self._closing.enter_context(PinnedReader(self.pinned_folder, self._io))
        return self._pinned

    def read(self, segment: str, plane: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` of this rank's shard of a plane; what is read is checked."""
        if not len(into):
            return
        border = self.segments[segment].filed_bytes(plane)
        filed = max(0, min(len(into), border - offset))
        if filed:
            self.file().read(segment, plane, offset, into[:filed])
        if filed < len(into):
            self._read_pinned(segment, plane, offset + filed, into[filed:])

    def _read_pinned(self, segment: str, plane: str, offset: int, into: memoryview) -> None:
        """From byte ``offset`` of the whole plane on, of which the generation has the end."""
        pinned = self.pinned()
        # Only whole chunks can be checked.
        size = pinned.manifest.chunk_bytes
        shard = next(spec for spec in pinned.shards if spec.name == segment)
        itemsize = next(spec.itemsize for spec in shard.planes if spec.plane == plane)
        offset -= (self.segments[segment].shard_numel - shard.numel) * itemsize
        first = offset // size * size
        last = min(shard.plane_bytes(Plane(plane)), -(-(offset + len(into)) // size) * size)
        if (first, last) == (offset, offset + len(into)):
            pinned.read(segment, Plane(plane), into, offset=offset).wait()
            return
        around = memoryview(bytearray(last - first))
        pinned.read(segment, Plane(plane), around, offset=first).wait()
        into[:] = around[offset - first : offset - first + len(into)]

    def close(self) -> None:
        self._closing.close()
        self._file = self._pinned = None


class CheckpointSource:
    """All ranks' parts of one checkpoint. Context manager. Tensors are on the CPU."""

    def __init__(self, folders: Sequence[str], records: Sequence[RankRecord], io: AsyncIO, kernels: Kernels) -> None:
        self.parts = [RankPart(folder, record, io) for folder, record in zip(folders, records, strict=True)]
        self._kernels = kernels
        self._places: dict[str, tuple[SegmentRecord, SlotRecord]] = {
            slot.name: (segment, slot) for segment in records[0].segments for slot in segment.slots
        }

    def names(self) -> set[str]:
        return set(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name][0].dtype

    def master(self, name: str, first: int, last: int) -> torch.Tensor:
        segment, _ = self._places[name]
        if not segment.trainable or segment.dtype is torch.float32:
            return self._plane(name, Plane.PARAM, segment.dtype, first, last)
        if str(Plane.MASTER) in (*segment.pinned, *segment.filed):
            return self._plane(name, Plane.MASTER, torch.float32, first, last)
        high = self._plane(name, Plane.PARAM, torch.bfloat16, first, last)
        low = self._plane(name, Plane.REMAINDER, torch.int16, first, last)
        master = torch.empty(high.shape, dtype=torch.float32)
        self._kernels.merge_bf16(
            master.numel(), param=high.data_ptr(), remainder=low.data_ptr(), master=master.data_ptr()
        )
        return master

    def moment(self, name: str, plane: Plane, first: int, last: int) -> torch.Tensor | None:
        segment, _ = self._places[name]
        if not segment.trainable or str(plane) not in (*segment.pinned, *segment.filed):
            return None
        return self._plane(name, plane, torch.float32, first, last)

    def gradient(self, name: str, first: int, last: int) -> torch.Tensor | None:
        """The accumulated gradient of the open window in the dtype it was kept in; None when there was none."""
        segment, slot = self._places[name]
        if not slot.gradient:
            return None
        return self._plane(name, Plane.GRAD, segment.gradient_dtype, first, last)

    def _plane(self, name: str, plane: Plane, dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of a parameter, put together from the ranks that have them."""
        segment, slot = self._places[name]
        values = torch.empty(last - first, dtype=dtype)
        view = bytes_of(values) if values.numel() else memoryview(b"")
        at, end = slot.offset + first, slot.offset + last
        begin = at
        while at < end:
            rank, within = divmod(at, segment.shard_numel)
            count = min(end - at, segment.shard_numel - within)
            where = (at - begin) * dtype.itemsize
            part = view[where : where + count * dtype.itemsize]
            self.parts[rank].read(segment.name, str(plane), within * dtype.itemsize, part)
            at += count
        return values

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""What a rank's part of a checkpoint holds, as plain data: segments, where each plane is, the gradients of an open window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina.tiers import Plane
from lamina.zero.adam.dtypes import plane_dtype
from lamina.zero.groups.segment import Segment

from .planes_file import Extent

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for what is no dtype of torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """A parameter's place in its segment, in elements; ``gradient``: it has one in the open window."""

    name: str
    shape: tuple[int, ...]
    offset: int
    gradient: bool

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """One rank's shard of a segment. ``pinned`` planes are in the generation's files but for the ``kept`` elements at their
    front, which are in the plane file, as ``filed`` planes are."""

    name: str
    dtype: torch.dtype
    trainable: bool
    numel: int
    world_size: int
    rank: int
    slots: tuple[SlotRecord, ...]
    pinned: tuple[str, ...]
    filed: tuple[str, ...]
    gradient_dtype: torch.dtype
    kept: int = 0

    @classmethod
    def of(cls, segment: Segment, gradient_dtype: torch.dtype, arrived: set[int]) -> "SegmentRecord":
        pinned = tuple(str(spec.plane) for spec in segment.stored_planes)
        filed = [str(spec.plane) for spec in segment.planes if str(spec.plane) not in pinned]
        if arrived:
            filed.append(str(Plane.GRAD))
        return cls(
            name=segment.name,
            dtype=segment.dtype,
            trainable=segment.trainable,
            numel=segment.layout.numel,
            world_size=segment.layout.world_size,
            rank=segment.rank,
            slots=tuple(
                SlotRecord(name=slot.name, shape=slot.shape, offset=slot.offset, gradient=index in arrived)
                for index, slot in enumerate(segment.layout.slots)
            ),
            pinned=pinned,
            filed=tuple(filed),
            gradient_dtype=gradient_dtype,
            kept=segment.kept,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "dtype": dtype_name(self.dtype),
            "gradient_dtype": dtype_name(self.gradient_dtype),
            "slots": [{**vars(slot), "shape": list(slot.shape)} for slot in self.slots],
            "pinned": list(self.pinned),
            "filed": list(self.filed),
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "SegmentRecord":
        """Raises KeyError, TypeError or ValueError for data that is no record."""
        return cls(
            name=str(data["name"]),
            dtype=dtype_of(data["dtype"]),
            trainable=bool(data["trainable"]),
            numel=int(data["numel"]),
            world_size=int(data["world_size"]),
            rank=int(data["rank"]),
            slots=tuple(
                SlotRecord(
                    name=str(slot["name"]),
                    shape=tuple(int(length) for length in slot["shape"]),
                    offset=int(slot["offset"]),
                    gradient=bool(slot["gradient"]),
                )
                for slot in data["slots"]
            ),
            pinned=tuple(str(plane) for plane in data["pinned"]),
            filed=tuple(str(plane) for plane in data["filed"]),
            gradient_dtype=dtype_of(data["gradient_dtype"]),
            kept=int(data.get("kept", 0)),  # none before there were any
        )

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def planes_in_file(self) -> tuple[str, ...]:
        """Planes of which the plane file has the front or all."""
        return (*self.filed, *(self.pinned if self.kept else ()))

    def filed_bytes(self, plane: str) -> int:
        """Bytes at the front of a plane of this rank's shard that are in the plane file; the others are pinned."""
        numel = self.shard_numel if plane in self.filed else self.kept
        dtype = self.gradient_dtype if plane == str(Plane.GRAD) else plane_dtype(Plane(plane), self.dtype)
        return numel * dtype.itemsize

    def same_shard(self, other: "SegmentRecord") -> bool:
        """Whether the bytes of every plane can be taken over as they are; where they are kept may differ."""
        mine, theirs = (
            (
                r.name,
                r.dtype,
                r.trainable,
                r.numel,
                r.world_size,
                r.rank,
                [(s.name, s.shape, s.offset) for s in r.slots],
            )
            for r in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True, kw_only=True)
class ClientTensor:
    """A tensor of a client's optimizer, in the plane file."""

    parameter: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def plane(self) -> str:
        """Its name in the plane file."""
        return f"client {self.key}"


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's part. ``has_pinned``: there is a pinned generation beside the plane file. ``client``: tensors of an optimizer
    of torch."""

    segments: tuple[SegmentRecord, ...]
    extents: tuple[Extent, ...]
    has_pinned: bool
    client: tuple[ClientTensor, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "segments": [segment.as_dict() for segment in self.segments],
            "extents": [extent.as_dict() for extent in self.extents],
            "has_pinned": self.has_pinned,
            "client": [{**vars(t), "dtype": dtype_name(t.dtype), "shape": list(t.shape)} for t in self.client],
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "RankRecord":
        """Raises KeyError, TypeError or ValueError for data that is no record."""
        return cls(
            segments=tuple(SegmentRecord.read(segment) for segment in data["segments"]),
            extents=tuple(Extent.of(extent) for extent in data["extents"]),
            has_pinned=bool(data["has_pinned"]),
            client=tuple(
                ClientTensor(
                    parameter=str(tensor["parameter"]),
                    key=str(tensor["key"]),
                    dtype=dtype_of(tensor["dtype"]),
                    shape=tuple(int(length) for length in tensor["shape"]),
                )
                for tensor in data["client"]
            ),
        )

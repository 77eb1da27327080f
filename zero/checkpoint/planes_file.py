"""The file of a checkpoint that holds planes which live in memory: raw bytes, page aligned, with a CRC32C per chunk.

The table of extents is plain data for the checkpoint's JSON; nothing in the file itself has to be parsed.
"""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lamina.aio_native import AsyncIO, BufferedIOWarning, File, crc32c
from lamina.tiers import IntegrityError
from lamina.zero.groups.partition import round_up

CHUNK_BYTES = 4 << 20
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Extent:
    """One plane of one segment in the file; ``crcs`` has a CRC32C for each chunk of CHUNK_BYTES."""

    segment: str
    plane: str
    offset: int
    nbytes: int
    crcs: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "crcs": list(self.crcs)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Extent":
        """Raises KeyError, TypeError or ValueError for data that is no extent."""
        extent = cls(
            segment=str(data["segment"]),
            plane=str(data["plane"]),
            offset=int(data["offset"]),
            nbytes=int(data["nbytes"]),
            crcs=tuple(int(crc) for crc in data["crcs"]),
        )
        if extent.offset < 0 or extent.nbytes < 0 or len(extent.crcs) != -(-extent.nbytes // CHUNK_BYTES):
            raise ValueError(f"the extent of {extent.segment}/{extent.plane} does not fit its checksums")
        return extent


def open_quietly(io: AsyncIO, path: str, **how: Any) -> File:
    """Open through the page cache where direct I/O is not to be had: for a checkpoint that is no matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BufferedIOWarning)
        return io.open(path, **how)


def write_planes(io: AsyncIO, path: str, planes: Iterable[tuple[str, str, memoryview]]) -> list[Extent]:
    """Write (segment, plane, bytes) to a new file, which the caller makes durable. Raises OSError.

    Checksums are taken while the disk works. The bytes may change when this returns.
    """
    listed = list(planes)
    offsets, end = [], 0
    for _, _, view in listed:
        offsets.append(end)
        end = round_up(end + len(view), PAGE)
    with open_quietly(io, path, create=True, exclusive=True, size=end) as file:
        handles = [
            io.write(file, view, offset) for (_, _, view), offset in zip(listed, offsets, strict=True) if len(view)
        ]
        extents = [
            Extent(segment=segment, plane=plane, offset=offset, nbytes=len(view), crcs=_checksums(view))
            for (segment, plane, view), offset in zip(listed, offsets, strict=True)
        ]
        for handle in handles:
            handle.wait()
    return extents


def _checksums(view: memoryview) -> tuple[int, ...]:
    return tuple(crc32c(view[begin : begin + CHUNK_BYTES]) for begin in range(0, len(view), CHUNK_BYTES))


class PlaneFile:
    """A written file, open for reading any range; every chunk that is touched is checked. Context manager.

    Raises IntegrityError for a missing file or a wrong length.
    """

    def __init__(self, io: AsyncIO, path: str, extents: Sequence[Extent]) -> None:
        self.path = path
        self._io = io
        self._extents = {(extent.segment, extent.plane): extent for extent in extents}
        wanted = max((extent.offset + extent.nbytes for extent in extents), default=0)
        if os.path.islink(path) or not os.path.isfile(path):
            raise IntegrityError(f"{path} is missing: the checkpoint is incomplete, load another one", path=path)
        found = os.path.getsize(path)
        if found < wanted:
            raise IntegrityError(
                f"{path} has {found:,} bytes, wanted {wanted:,}: the checkpoint is damaged, load another one",
                path=path,
                expected=wanted,
                found=found,
            )
        self._file = open_quietly(io, path)

    def read(self, segment: str, plane: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` of a plane. Raises KeyError, IntegrityError."""
        extent = self._extents[(segment, plane)]
        end = offset + len(into)
        if offset < 0 or end > extent.nbytes:
            raise ValueError(f"{segment}/{plane}: bytes {offset:,} to {end:,} of {extent.nbytes:,}")
        if not len(into):
            return
        first = offset // CHUNK_BYTES * CHUNK_BYTES
        last = min(extent.nbytes, round_up(end, CHUNK_BYTES))
        whole = (first, last) == (offset, end)
        view = into if whole else memoryview(bytearray(last - first))
        self._io.read(self._file, view, extent.offset + first).wait()
        for begin in range(first, last, CHUNK_BYTES):
            self._check(extent, begin, view[begin - first : min(last, begin + CHUNK_BYTES) - first])
        if not whole:
            into[:] = view[offset - first : end - first]

    def _check(self, extent: Extent, begin: int, chunk: memoryview) -> None:
        wanted, found = extent.crcs[begin // CHUNK_BYTES], crc32c(chunk)
        if found != wanted:
            where = extent.offset + begin
            raise IntegrityError(
                f"{self.path}: {extent.plane} of {extent.segment} is damaged at offset {where:,}: CRC32C expected "
                f"{wanted:08x}, found {found:08x}. Load another checkpoint",
                path=self.path,
                offset=where,
                chunk=begin // CHUNK_BYTES,
                expected=wanted,
                found=found,
                shard=extent.segment,
                plane=extent.plane,
            )

    def close(self) -> None:
        """Harmless when repeated."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A slot: the files of one generation, one per stripe, opened and ready for transfers."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lamina.aio_native import AsyncIO, File, Handle, Priority, Read, Write
from lamina.tiers.errors import IntegrityError, fault
from lamina.tiers.nvme.folder import RankFolder
from lamina.tiers.nvme.handle import Part, TransferHandle, outcome, started
from lamina.tiers.nvme.layout import Layout, PlaneExtent, Segment
from lamina.tiers.nvme.manifest import SlotRecord
from lamina.tiers.nvme.wear import Wear


class Slot:
    """Open files of one slot. where: stripe -> index of its folder.

    holds: copies that still read from these files; while there is one, they are not written.
    """

    def __init__(
        self,
        record: SlotRecord,
        layout: Layout,
        files: Mapping[int, File],
        where: Mapping[int, int],
        io: AsyncIO,
        wear: Wear,
    ) -> None:
        self.record = record
        self.layout = layout
        self.files = dict(files)
        self.where = dict(where)
        self.holds = 0
        self._given_up = False
        self._readers: list[TransferHandle] = []
        self._writes = 1  # what was in the files when they were opened counts as one that may not be durable
        self._durable_writes = 0
        self._io = io
        self._wear = wear

    @classmethod
    def create(
        cls, record: SlotRecord, layout: Layout, folders: Sequence[RankFolder], io: AsyncIO, wear: Wear
    ) -> "Slot":
        """Create and preallocate the files; stripe k lies in folder k. Raises OSError, with nothing left
        behind."""
        files: dict[int, File] = {}
        try:
            for stripe, name in record.names().items():
                path = folders[stripe].file(name)
                files[stripe] = io.open(path, create=True, exclusive=True, size=layout.file_bytes[stripe])
        except BaseException:
            for file in files.values():
                file.close()
                os.unlink(file.path)
            raise
        return cls(record, layout, files, {stripe: stripe for stripe in files}, io, wear)

    @classmethod
    def open(
        cls,
        record: SlotRecord,
        layout: Layout,
        folders: Sequence[RankFolder],
        io: AsyncIO,
        wear: Wear,
        *,
        writable: bool = True,
    ) -> "Slot":
        """Open existing files, each wherever among the folders it lies. Raises IntegrityError for a missing
        file or one of the wrong length."""
        where = locate(record, [folder.file for folder in folders])
        files: dict[int, File] = {}
        try:
            for stripe, (_, path) in where.items():
                check_length(path, layout.file_bytes[stripe])
                files[stripe] = io.open(path, writable=writable)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(record, layout, files, {stripe: index for stripe, (index, _) in where.items()}, io, wear)

    def read(self, extent: PlaneExtent, offset: int, view: memoryview, priority: Priority) -> list[Part]:
        """Start reading len(view) bytes from byte `offset` of a plane. Raises ValueError past its end."""
        parts = []
        for stripe, pieces in _by_stripe(self._segments(extent, offset, len(view))):
            self._wear.count_read(self.where[stripe], sum(piece.nbytes for piece in pieces))
            parts.append(started(stripe, partial(self._start_read, self.files[stripe], pieces, view, priority)))
        return parts

    def _segments(self, extent: PlaneExtent, offset: int, nbytes: int) -> list[Segment]:
        # The extent may be that of files striped otherwise (a transaction moves off a failed path at any time): it
        # names the plane, where it lies is for this slot's own layout to say.
        return self.layout.segments(self.layout.extent(extent.shard, extent.plane), offset, nbytes)

    def _start_read(self, file: File, pieces: Sequence[Segment], view: memoryview, priority: Priority) -> Handle:
        if len(pieces) == 1:
            (piece,) = pieces
            return self._io.read(file, _part(view, piece), piece.file_offset, priority=priority)
        requests = [Read(file, _part(view, piece), piece.file_offset) for piece in pieces]
        return self._io.submit(requests, priority=priority)

    def write(self, extent: PlaneExtent, offset: int, view: memoryview, priority: Priority) -> list[Part]:
        """Start writing len(view) bytes at byte `offset` of a plane. Raises ValueError past its end."""
        self._writes += 1
        parts = []
        for stripe, pieces in _by_stripe(self._segments(extent, offset, len(view))):
            self._wear.count_written(self.where[stripe], sum(piece.nbytes for piece in pieces))
            parts.append(started(stripe, partial(self._start_write, self.files[stripe], pieces, view, priority)))
        return parts

    def _start_write(self, file: File, pieces: Sequence[Segment], view: memoryview, priority: Priority) -> Handle:
        if len(pieces) == 1:
            (piece,) = pieces
            return self._io.write(file, _part(view, piece), piece.file_offset, priority=priority)
        requests = [Write(file, _part(view, piece), piece.file_offset) for piece in pieces]
        return self._io.submit(requests, priority=priority)

    def write_tables(self, tables: Sequence[bytes]) -> list[Part]:
        """Start writing each stripe's checksum table. The tables must stay alive until the parts are done."""
        self._writes += 1
        parts = []
        for stripe, file in self.files.items():
            if tables[stripe]:
                offset = self.layout.sums_offsets[stripe]
                parts.append(started(stripe, partial(self._io.write, file, memoryview(tables[stripe]), offset)))
                self._wear.count_written(self.where[stripe], len(tables[stripe]))
        return parts

    def read_tables(self) -> list[bytes]:
        """Each stripe's checksum table."""
        tables = [b""] * len(self.layout.counts)
        for stripe, file in self.files.items():
            buffer = bytearray(self.layout.sums_bytes[stripe])
            if buffer:
                self._io.read(file, memoryview(buffer), self.layout.sums_offsets[stripe]).wait()
            tables[stripe] = bytes(buffer)
        return tables

    def sync(self) -> list[Part]:
        """Start making the files' data durable."""
        return [started(stripe, partial(self._io.fsync, file)) for stripe, file in self.files.items()]

    @property
    def unsynced(self) -> bool:
        """Whether something was written that is not known to be durable."""
        return self._durable_writes < self._writes

    def make_durable(self) -> tuple[int, OSError] | None:
        """Wait until everything written is durable; the stripe that failed and why, if one did."""
        writes = self._writes
        failure = first_failure(self.sync()) if self.unsynced else None
        if failure is None:
            self._durable_writes = max(self._durable_writes, writes)
        return failure

    def flush(self) -> TransferHandle:
        """Start making everything written durable; at once when it is. Its wait() raises StorageFault."""
        writes = self._writes

        def finish(_: memoryview) -> None:
            self._durable_writes = max(self._durable_writes, writes)

        def refuse(stripe: int, error: OSError) -> Sequence[Part]:
            raise fault(error, "making a generation durable")

        parts = self.sync() if self.unsynced else []
        return self.track(TransferHandle(parts, memoryview(b""), finish=finish, rescue=refuse))

    def own_names_only(self) -> bool:
        """Whether no file has another name, that of a checkpoint: with one it must never be written again."""
        return all(_links(file.path) == 1 for file in self.files.values())

    def paths(self) -> list[str]:
        """The files' paths."""
        return [os.fspath(file.path) for file in self.files.values()]

    def track(self, handle: TransferHandle) -> TransferHandle:
        """Remember a reader until it is done; see drain()."""
        self._readers = [reader for reader in self._readers if reader.needs_files()]
        self._readers.append(handle)
        return handle

    def drain(self) -> None:
        """Have the readers finish, checks included, before the files are written again. How each ended its wait() tells."""
        for reader in self._readers:
            with contextlib.suppress(OSError, RuntimeError):
                reader.wait()
        self._readers = []

    def hold(self) -> None:
        """Begin a copy from these files."""
        self.holds += 1

    def unhold(self) -> None:
        """End a copy from these files."""
        self.holds -= 1
        if self._given_up:
            self.give_up()

    def give_up(self) -> None:
        """Close the files as soon as nobody copies from them; their names are gone, so nobody writes to them either."""
        self._given_up = True
        if not self.holds:
            self.drain()
            self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()
        self.files = {}


def _links(path: str) -> int:
    """How many names a file has; 0 when it is gone."""
    try:
        return os.stat(path, follow_symlinks=False).st_nlink
    except FileNotFoundError:
        return 0


def locate(record: SlotRecord, finders: Sequence[Callable[[str], str]]) -> dict[int, tuple[int, str]]:
    """Stripe -> (index of the folder that has its file, path). Raises IntegrityError for a missing file."""
    found: dict[int, tuple[int, str]] = {}
    for stripe, name in record.names().items():
        candidates = [finder(name) for finder in finders]
        hits = [(index, path) for index, path in enumerate(candidates) if os.path.lexists(path)]
        if not hits:
            raise IntegrityError(
                f"{name} is missing: looked for {', '.join(candidates)}. Give every path in tiers.nvme "
                "that the "
                "job was started with, or restore from a checkpoint",
                path=candidates[0],
            )
        found[stripe] = hits[0]
    return found


def check_length(path: str, nbytes: int) -> None:
    """Raise IntegrityError when a file was truncated or lengthened."""
    found = os.stat(path, follow_symlinks=False).st_size
    if found != nbytes:
        how = "truncated" if found < nbytes else "lengthened"
        raise IntegrityError(
            f"{path} was {how}: it has {found:,} bytes, its manifest says {nbytes:,}. Restore from a checkpoint",
            path=path,
            offset=min(found, nbytes),
            expected=nbytes,
            found=found,
        )


def _part(view: memoryview, piece: Segment) -> memoryview:
    return view[piece.buffer_offset : piece.buffer_offset + piece.nbytes]


def _by_stripe(segments: Sequence[Segment]) -> list[tuple[int, list[Segment]]]:
    stripes: dict[int, list[Segment]] = {}
    for segment in segments:
        stripes.setdefault(segment.stripe, []).append(segment)
    return list(stripes.items())


def first_failure(parts: Sequence[Part]) -> tuple[int, OSError] | None:
    """Wait for all parts; the first stripe that failed and why, or None."""
    failures = [(part.stripe, error) for part in parts if (error := outcome(part.handle)) is not None]
    return failures[0] if failures else None

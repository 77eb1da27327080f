"""A checkpoint by pinning: hard links to the current generation's files, which are then never written again.

Where a link cannot be made (another file system), the file is copied in the background with a few buffers.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.aio_native import AsyncIO, File, Priority, crc32c
from lamina.tiers.background import Background
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.folder import sync_directory
from lamina.tiers.nvme.handle import Part, TransferHandle
from lamina.tiers.nvme.layout import Layout
from lamina.tiers.nvme.manifest import (
    MANIFEST_NAME,
    TEMPORARY_NAME,
    Manifest,
    publish_temporary,
    read_manifest,
    sync_temporary,
    write_temporary,
)
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.stream import Scratch, damage, pump

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of one stripe's file, copied at once. chunks: (file offset, bytes, index in the layout)."""

    offset: int
    nbytes: int
    chunks: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class CopyJob:
    """One file that has to be copied."""

    slot: Slot
    sums: ChunkSums
    stripe: int
    path: str


class PinnedGeneration:
    """A generation that a directory keeps. Made by GenerationStore.pin().

    linked_bytes: of files that are shared with the store. copied_bytes: copied so far.
    """

    def __init__(self, directory: str, manifest: Manifest, *, linked_bytes: int, copy_bytes: int) -> None:
        record = manifest.committed[0]
        self.directory = directory
        self.id = record.id
        self.step = record.step
        self.meta: Mapping[str, Any] = dict(record.meta)
        self.linked_bytes = linked_bytes
        self.copy_bytes = copy_bytes
        self.copied_bytes = 0
        self._manifest = manifest
        self._background: Background | None = None

    def done(self) -> bool:
        """Whether the directory is complete and durable (or that failed)."""
        return self._background is None or self._background.over

    def wait(self, timeout: float | None = None) -> None:
        """Return once the directory is complete and durable. Raises what went wrong in the background, or TimeoutError."""
        if self._background is None:
            return
        if not self._background.wait(timeout):
            raise TimeoutError(
                f"{self.directory}: {self.copied_bytes:,} of {self.copy_bytes:,} bytes copied after {timeout} s"
            )
        if self._background.error is not None:
            raise self._background.error

    def finish(self) -> None:
        """Wait for the background, however it ends; wait() tells."""
        if self._background is not None:
            self._background.wait()

    def remove(self) -> None:
        """Delete the directory's files, and the directory if nothing else is in it. A store that was restored from them
        keeps its own names."""
        self.finish()
        remove_pinned(self.directory, self._manifest)

    def complete(self, work: Callable[["PinnedGeneration"], None]) -> None:
        """Do what is left to do, now. Nothing is left of the directory when that fails."""
        try:
            work(self)
        except BaseException:
            remove_pinned(self.directory, self._manifest)
            raise

    def start(self, work: Callable[["PinnedGeneration"], None]) -> None:
        """The same in the background; wait() tells how it ended."""
        self._background = Background(lambda: self.complete(work), "lamina-pin")
        self._background.start()

    def __repr__(self) -> str:
        state = "complete" if self.done() else f"{self.copied_bytes:,} of {self.copy_bytes:,} bytes copied"
        return f"PinnedGeneration({self.directory!r}, step {self.step}, {state})"


def remove_pinned(directory: str, manifest: Manifest) -> None:
    """Delete a pinned generation's files, and the directory if nothing else is in it. See [Note: cut pins]."""
    temporary = os.path.join(directory, TEMPORARY_NAME)
    with contextlib.suppress(FileNotFoundError):
        os.rename(os.path.join(directory, MANIFEST_NAME), temporary)
    names = [name for slot in manifest.slots for name in slot.names().values()]
    for path in [*(os.path.join(directory, name) for name in names), temporary]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def unpin(directory: str) -> None:
    """Delete the pinned generation in a directory, of this process or an earlier one. Raises StoreError when there is
    none."""
    manifest = read_manifest(os.path.join(directory, MANIFEST_NAME))
    if manifest is None:
        raise StoreError(f"{directory} holds no pinned generation (no {MANIFEST_NAME})")
    remove_pinned(directory, manifest)


def start_pin(
    directory: str, manifest: Manifest, sources: Sequence[tuple[Slot, ChunkSums]]
) -> tuple[PinnedGeneration, list[CopyJob]]:
    """Link what can be linked: from then on the bytes are kept. What is left is to be copied, then finish_pin().

    [Note: cut pins] The manifest is written under its temporary name before any other file and renamed when all are
    there; a removal renames it back first and deletes it last. A directory with only the temporary one was left by a
    crash, and the files that it lists are ours.
    """
    _make_directory(directory, manifest)
    try:
        write_temporary(manifest, directory, durable=False)
        linked, jobs = link_files(directory, sources)
    except BaseException:
        remove_pinned(directory, manifest)
        raise
    copies = sum(job.slot.layout.file_bytes[job.stripe] for job in jobs)
    return PinnedGeneration(directory, manifest, linked_bytes=linked, copy_bytes=copies), jobs


def _make_directory(directory: str, manifest: Manifest) -> None:
    """Create it, 0700. Raises FileExistsError when it holds a pinned generation or foreign files of the same names."""
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    try:
        os.mkdir(directory, 0o700)
        return
    except FileExistsError:
        if os.path.islink(directory) or not os.path.isdir(directory):
            raise
    if not os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        _remove_cut_pin(directory)
    for name in [MANIFEST_NAME, *(name for slot in manifest.slots for name in slot.names().values())]:
        path = os.path.join(directory, name)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "a checkpoint is there already; name another directory", path)


def _remove_cut_pin(directory: str) -> None:
    try:
        cut = read_manifest(os.path.join(directory, TEMPORARY_NAME))
    except StoreError:
        return  # cut while it was written: nothing had been put beside it, and it is written anew
    if cut is not None:
        for name in (name for slot in cut.slots for name in slot.names().values()):
            if os.path.lexists(path := os.path.join(directory, name)):
                os.unlink(path)


def link_files(directory: str, sources: Sequence[tuple[Slot, ChunkSums]]) -> tuple[int, list[CopyJob]]:
    """Hard link what can be linked: (bytes linked, what has to be copied)."""
    linked = 0
    jobs: list[CopyJob] = []
    for slot, sums in sources:
        for stripe, name in slot.record.names().items():
            path = os.path.join(directory, name)
            try:
                os.link(slot.files[stripe].path, path, follow_symlinks=False)
                linked += slot.layout.file_bytes[stripe]
            except OSError as error:
                if error.errno not in NO_LINK:
                    raise
                jobs.append(CopyJob(slot=slot, sums=sums, stripe=stripe, path=path))
    return linked, jobs


def copy_files(pinned: PinnedGeneration, jobs: Sequence[CopyJob], io: AsyncIO) -> None:
    """Copy, check and make durable."""
    for job in jobs:
        layout = job.slot.layout
        with _open_target(io, job.path, layout.file_bytes[job.stripe]) as target:
            copy_stripe(pinned, job, target, io)
            table = bytearray(job.sums.tables()[job.stripe])
            if table:
                io.write(target, table, layout.sums_offsets[job.stripe]).wait()
            io.fsync(target).wait()


def _open_target(io: AsyncIO, path: str, nbytes: int) -> File:
    """A new file; through the page cache where direct I/O is not to be had, without a warning: in a thread, where warnings are
    errors, it would end the copy."""
    try:
        return io.open(path, create=True, exclusive=True, size=nbytes, direct=True)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return io.open(path, create=True, exclusive=True, size=nbytes, direct=False)


def finish_pin(directory: str, linked: Sequence[Slot]) -> None:
    """Make the linked files durable, then let the manifest count. Raises StorageFault, OSError."""
    flushes = [slot.flush() for slot in linked]
    try:
        sync_temporary(directory)
    finally:
        for flush in flushes:
            flush.drain()
    for flush in flushes:
        flush.wait()
    publish_temporary(directory)
    sync_directory(os.path.dirname(directory))


def copy_stripe(pinned: PinnedGeneration, job: CopyJob, target: File, io: AsyncIO) -> None:
    """Copy the chunks of one file and check them on the way. Raises IntegrityError."""
    source = job.slot.files[job.stripe]
    extents = {extent.first_chunk: extent for extent in job.slot.layout.extents.values() if extent.num_chunks}
    firsts = sorted(extents)

    def start(run: Run, view: memoryview) -> TransferHandle:
        handle = io.read(source, view, run.offset, priority=Priority.WRITE_BACK)
        return TransferHandle([Part(job.stripe, handle)], view)

    def sink(run: Run, view: memoryview) -> TransferHandle:
        for offset, nbytes, index in run.chunks:
            found = crc32c(view[offset - run.offset : offset - run.offset + nbytes])
            if found != job.sums.values[index]:
                extent = extents[max(first for first in firsts if first <= index)]
                chunk = index - extent.first_chunk
                raise damage(job.slot, extent, chunk, job.sums.values[index], found, "the generation being pinned")
        pinned.copied_bytes += run.nbytes
        return TransferHandle([Part(job.stripe, io.write(target, view, run.offset))], view)

    with Scratch(job.slot.layout.chunk_bytes) as scratch:
        pump(start, runs(job.slot.layout, job.stripe, scratch.piece_bytes), scratch, sink)


def runs(layout: Layout, stripe: int, piece_bytes: int) -> Iterator[Run]:
    """The chunks of a stripe's file in order, neighbours taken together up to piece_bytes."""
    chunks: list[tuple[int, int, int]] = []
    for extent in layout.extents.values():
        for chunk in range(extent.num_chunks):
            place, offset = layout.chunk_place(extent, chunk)
            if place != stripe:
                continue
            nbytes = min(layout.chunk_bytes, extent.nbytes - chunk * layout.chunk_bytes)
            if chunks and offset + nbytes - chunks[0][0] > piece_bytes:
                yield _run(chunks)
                chunks = []
            chunks.append((offset, nbytes, extent.first_chunk + chunk))
    if chunks:
        yield _run(chunks)


def _run(chunks: list[tuple[int, int, int]]) -> Run:
    start = chunks[0][0]
    return Run(start, chunks[-1][0] + chunks[-1][1] - start, tuple(chunks))

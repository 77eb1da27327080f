"""Reading a pinned generation: for a restore, or to look into one without a store."""

import os
from types import TracebackType
from typing import Any, Self

from lamina.aio_native import AsyncIO, Priority
from lamina.tiers.errors import LayoutError, StoreError
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.handle import TransferHandle, as_bytes
from lamina.tiers.nvme.layout import Layout
from lamina.tiers.nvme.manifest import MANIFEST_NAME, GenerationRecord, Manifest, SlotRecord, read_manifest
from lamina.tiers.nvme.opening import read_sums
from lamina.tiers.nvme.slot import Slot, check_length, locate
from lamina.tiers.nvme.stream import check_chunks
from lamina.tiers.nvme.wear import Wear
from lamina.tiers.tier import Plane, ShardSpec


class PinnedReader:
    """A pinned generation, open for reading. Context manager.

    Raises StoreError when the directory holds none, IntegrityError for missing files or a wrong length.
    """

    def __init__(self, directory: str, io: AsyncIO) -> None:
        self.directory = os.path.abspath(directory)
        manifest = read_manifest(os.path.join(self.directory, MANIFEST_NAME))
        if manifest is None or not manifest.committed:
            raise StoreError(
                f"{self.directory} holds no complete pinned generation (no {MANIFEST_NAME}): its copy was cut, or it is "
                "another directory"
            )
        self.manifest: Manifest = manifest
        self.record: GenerationRecord = manifest.committed[0]
        self._io = io
        self._wear = Wear([self.directory])
        self._sums: dict[str, ChunkSums] = {}
        self.main = self._open(self.record.slot, frozen=False)
        self.frozen = None if manifest.frozen is None else self._open(manifest.frozen.slot, frozen=True)

    @property
    def shards(self) -> tuple[ShardSpec, ...]:
        """What it holds, in execution order."""
        return self.manifest.shards

    @property
    def step(self) -> int:
        """The training step."""
        return self.record.step

    @property
    def meta(self) -> dict[str, Any]:
        """What was given to commit()."""
        return dict(self.record.meta)

    def _open(self, record: SlotRecord, *, frozen: bool) -> Slot:
        if record.is_frozen != frozen:
            raise LayoutError(f"{self.directory}: slot {record.stem} is listed as what it is not")
        shards = [shard for shard in self.manifest.shards if shard.frozen == frozen]
        layout = Layout(shards, counts=record.counts, chunk_bytes=self.manifest.chunk_bytes)
        where = locate(record, [lambda name: os.path.join(self.directory, name)])
        files = {}
        for stripe, (_, path) in where.items():
            if os.path.islink(path):
                raise StoreError(f"{path} is a symbolic link, which is not followed")
            check_length(path, layout.file_bytes[stripe])
            files[stripe] = self._io.open(path)
        return Slot(record, layout, files, dict.fromkeys(files, 0), self._io, self._wear)

    def sums(self, *, check: bool) -> dict[str, ChunkSums]:
        """Checksums by slot; check reads and checks every byte. Raises IntegrityError."""
        title = f"pinned generation {self.record.id}, step {self.record.step}"
        found = {self.main.record.stem: read_sums(self.main, self.record.sums_crc, title, check=check)}
        if self.frozen is not None and self.manifest.frozen is not None:
            crcs = self.manifest.frozen.sums_crc
            found[self.frozen.record.stem] = read_sums(self.frozen, crcs, "pinned frozen planes", check=check)
        self._sums = found
        return found

    def read(self, shard: str, plane: Plane, buffer: Any, *, offset: int = 0) -> TransferHandle:
        """Start reading from BYTE offset of a plane; whole chunks are checked. Raises KeyError, ValueError."""
        view = as_bytes(buffer)
        slot = self.main
        if self.frozen is not None and (shard, plane) in self.frozen.layout.extents:
            slot = self.frozen
        sums = (self._sums or self.sums(check=False))[slot.record.stem]
        extent = slot.layout.extent(shard, plane)

        def check(data: memoryview) -> None:
            check_chunks(slot, sums, extent, offset, data, f"pinned step {self.record.step}")

        return slot.track(TransferHandle(slot.read(extent, offset, view, Priority.DEMAND), view, finish=check))

    def close(self) -> None:
        """Close the files; harmless when repeated."""
        for slot in (self.main, self.frozen):
            if slot is not None:
                slot.drain()
                slot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

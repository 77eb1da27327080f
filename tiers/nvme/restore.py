"""Bringing a pinned generation back into a store: by hard links where the disks allow, else by a checked copy."""

import os
from collections.abc import Mapping

from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.folder import sync_directory
from lamina.tiers.nvme.handle import TransferHandle
from lamina.tiers.nvme.lock import file_device
from lamina.tiers.nvme.manifest import SlotRecord
from lamina.tiers.nvme.pin import NO_LINK
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.slot_pool import SlotPool
from lamina.tiers.nvme.stream import Piece, Scratch, check_chunks, cut, pump, reader, whole_planes
from lamina.tiers.nvme.transaction import Transaction


def link_into(pool: SlotPool, pinned: PinnedReader) -> dict[str, Slot] | None:
    """New slots that share the pinned files, by the pinned slot's stem; None when they cannot be linked."""
    if pinned.manifest.chunk_bytes != pool.manifest.chunk_bytes:
        return None
    plan: list[tuple[Slot, SlotRecord, dict[int, int]]] = []
    for slot in (pinned.main, pinned.frozen):
        if slot is None:
            continue
        places = {stripe: _folder_for(pool, file.path, stripe) for stripe, file in slot.files.items()}
        homes = {stripe: index for stripe, index in places.items() if index is not None}
        if len(homes) < len(places):
            return None
        stem = pool.next_frozen_stem() if slot.record.is_frozen else pool.next_stem()
        plan.append((slot, pool.record(stem, slot.record.counts), homes))
    records = [record for _, record, _ in plan]
    pool.save(pool.manifest.with_(slots=(*pool.manifest.slots, *records)))
    try:
        for slot, record, homes in plan:
            for stripe, name in record.names().items():
                os.link(slot.files[stripe].path, pool.folders[homes[stripe]].file(name), follow_symlinks=False)
    except OSError as error:
        pool.forget(records)
        if error.errno in NO_LINK:
            return None
        raise
    for folder in pool.folders:
        sync_directory(folder.path)
    made = {}
    for slot, record, _ in plan:
        made[slot.record.stem] = Slot.open(record, pool.layout(record), pool.folders, pool.io, pool.wear)
        pool.slots[record.stem] = made[slot.record.stem]
    return made


def _folder_for(pool: SlotPool, path: str, stripe: int) -> int | None:
    """A folder on the file's own file system, that of its stripe if possible."""
    device = os.stat(path).st_dev
    order = sorted(range(len(pool.folders)), key=lambda index: index != stripe)
    return next((i for i in order if file_device(pool.folders[i]) == device and i not in pool.failed), None)


def copy_into(transaction: Transaction, pinned: PinnedReader, sums: Mapping[str, ChunkSums]) -> None:
    """Write a pinned generation into a transaction, checking it on the way. Raises IntegrityError."""
    title = f"pinned generation {pinned.record.id}, step {pinned.record.step}"
    for slot in (pinned.main, pinned.frozen):
        if slot is None:
            continue
        known = sums[slot.record.stem]

        def sink(piece: Piece, view: memoryview, slot: Slot = slot, known: ChunkSums = known) -> TransferHandle:
            check_chunks(slot, known, piece.extent, piece.offset, view, title)
            shard, plane = piece.extent.shard, piece.extent.plane
            return transaction.write(shard, plane, view, offset=transaction.begin_of(shard, plane) + piece.offset)

        with Scratch(slot.layout.chunk_bytes) as scratch:
            pieces = cut(whole_planes(slot.layout), slot.layout.chunk_bytes, scratch.piece_bytes)
            pump(reader(slot), pieces, scratch, sink)

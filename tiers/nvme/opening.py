"""Opening a store: locks, checks, what a crash left behind, and the first files."""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from lamina.aio_native import AsyncIO, crc32c
from lamina.tiers.errors import IntegrityError, LayoutError, StoreError
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.folder import RankFolder
from lamina.tiers.nvme.layout import CHUNK_BYTES, require_same_shards
from lamina.tiers.nvme.lock import LOCK_NAME, FolderLock
from lamina.tiers.nvme.manifest import (
    FROZEN_STEM,
    MANIFEST_NAME,
    TEMPORARY_NAME,
    Manifest,
    SlotRecord,
    read_manifest,
)
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.slot_pool import SlotPool
from lamina.tiers.nvme.stream import verify
from lamina.tiers.nvme.wear import Wear
from lamina.tiers.tier import NvmePath, ShardSpec

Verify = Literal["always", "resume", "off"]
VERIFY_MODES: tuple[Verify, ...] = ("always", "resume", "off")


class Opening:
    """One attempt to open a store. notes: what it found and did."""

    def __init__(
        self,
        paths: Sequence[NvmePath],
        *,
        job: str,
        rank: int,
        shards: Sequence[ShardSpec],
        io: AsyncIO,
        generations: int,
        verify: Verify,
    ) -> None:
        if not paths:
            raise StoreError("tiers.nvme is empty: name at least one directory, as in tiers.nvme = [{path: ...}]")
        if generations not in (1, 2, 3):
            raise ValueError(f"tiers.generations is {generations}, must be 1, 2 or 3")
        if verify not in VERIFY_MODES:
            raise ValueError(f"tiers.verify is {verify!r}, must be one of {', '.join(VERIFY_MODES)}")
        names = [shard.name for shard in shards]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"shard {twice} is listed twice")
        self.notes: list[str] = []
        self._paths = list(paths)
        self._job = job
        self._rank = rank
        self._shards = tuple(shards)
        self._io = io
        self._generations = generations
        self._left_out = frozenset[str]()
        self._fronts: Mapping[str, int] = {}

    def run(
        self, *, chunk_bytes: int | None, discard_torn: bool, left_out: Iterable[str], fronts: Mapping[str, int]
    ) -> tuple[SlotPool, list[FolderLock]]:
        """The pool with every slot open, and the locks. On failure everything is unlocked and closed
        again, and what this opening made is gone. left_out, fronts: what new files do not hold."""
        self._left_out, self._fronts = frozenset(left_out), fronts
        folders = self._folders()
        locks: list[FolderLock] = []
        try:
            for folder in folders:
                locks.append(FolderLock(folder.path))
                if locks[-1].takeover:
                    self.notes.append(f"{folder.path}: {locks[-1].takeover}")
            return self._pool(folders, chunk_bytes, discard_torn), locks
        except BaseException:
            for folder, lock in zip(folders, locks, strict=False):
                unused = os.listdir(folder.path) == [LOCK_NAME]
                lock.release(remove=unused)
                if unused:
                    folder.remove_empty()
            for folder in folders[len(locks) :]:
                folder.remove_created()
            raise

    def _folders(self) -> list[RankFolder]:
        folders: list[RankFolder] = []
        try:
            for index, path in enumerate(self._paths):
                folder = RankFolder(path.path, job=self._job, rank=self._rank, key=f"tiers.nvme[{index}].path")
                folders.append(folder)
                for other in folders[:-1]:
                    if os.path.samefile(folder.path, other.path):
                        raise StoreError(
                            f"{folder.key} = {folder.root!r} is the same directory as {other.key}: list it once"
                        )
                self.notes += folder.notes
        except BaseException:
            for folder in reversed(folders):
                folder.remove_created()
            raise
        return folders

    def _pool(self, folders: list[RankFolder], chunk_bytes: int | None, discard_torn: bool) -> SlotPool:
        manifest, home = self._manifest(folders)
        wear = Wear([folder.root for folder in folders])
        is_new = manifest is None
        if manifest is None:
            manifest = Manifest(
                store_id=secrets.token_hex(8),
                job=self._job,
                rank=self._rank,
                chunk_bytes=chunk_bytes or CHUNK_BYTES,
                shards=self._shards,
                generations=self._generations,
            )
        else:
            self._check(manifest, folders[home].path, discard_torn)
            if manifest.updating is not None:
                self.notes.append(f"discarded generation {manifest.updating}, an in-place update that was cut")
                manifest = manifest.with_(updating=None, committed=())
        manifest = manifest.with_(generations=self._generations)
        pool = SlotPool(folders, self._paths, self._io, wear, manifest, home)
        pool.left_out, pool.fronts = self._left_out, dict(self._fronts)
        try:
            self._clean(pool)
            self._open_slots(pool)
        except BaseException:
            # A store that was there before stays as it is: its slots may hold state.
            pool.close(remove=is_new)
            raise
        return pool

    def _manifest(self, folders: Sequence[RankFolder]) -> tuple[Manifest | None, int]:
        found: list[tuple[Manifest, int]] = []
        for index, folder in enumerate(folders):
            if os.path.lexists(temporary := folder.file(TEMPORARY_NAME)):
                os.unlink(temporary)
                self.notes.append(f"removed {temporary}, a commit that was cut")
            manifest = read_manifest(folder.file(MANIFEST_NAME))
            if manifest is not None:
                found.append((manifest, index))
        if len({manifest.store_id for manifest, _ in found}) > 1:
            where = " and ".join(folders[index].path for _, index in found)
            raise LayoutError(
                f"{where} hold manifests of separate stores: give only the paths that one job was started with"
            )
        if not found:
            return None, 0
        found.sort(key=lambda pair: pair[0].revision)
        *older, newest = found
        for _, index in older:  # see [Note: a manifest that moved]
            folders[index].remove([MANIFEST_NAME])
            self.notes.append(
                f"removed {folders[index].file(MANIFEST_NAME)}, which is older than the one on another path"
            )
        return newest

    def _check(self, manifest: Manifest, where: str, discard_torn: bool) -> None:
        if (manifest.job, manifest.rank) != (self._job, self._rank):
            raise LayoutError(
                f"{where} holds job {manifest.job!r} rank {manifest.rank}, wanted job {self._job!r} rank "
                f"{self._rank}: "
                "the folder was moved or renamed"
            )
        require_same_shards(self._shards, manifest.shards, where)
        if manifest.updating is not None and not discard_torn:
            raise StoreError(
                f"{where}: the in-place update of generation {manifest.updating} was cut (generations: 1), "
                "so the state is a mixture of two steps. Start anew with resume=False (discard_torn=True of a store's open()) "
                "and load a checkpoint"
            )

    def _clean(self, pool: SlotPool) -> None:
        """Remove what is known as ours and not needed any more."""
        for record in pool.manifest.retired:
            for folder in pool.folders:
                for name in record.names().values():
                    path = folder.file(name)
                    if os.path.lexists(path):
                        os.unlink(path)
                        self.notes.append(f"removed {path}, a leftover")
        pool.manifest = pool.manifest.with_(retired=())

    def _open_slots(self, pool: SlotPool) -> None:
        manifest = pool.manifest
        needed = {record.slot.stem for record in manifest.committed[:1]}
        if manifest.frozen is not None:
            needed.add(manifest.frozen.slot.stem)
        spoiled: list[SlotRecord] = []
        for record in manifest.slots:
            try:
                pool.slots[record.stem] = Slot.open(record, pool.layout(record), pool.folders, self._io, pool.wear)
            except IntegrityError:
                # A free slot that a crash caught while it was made; one with state in it is an error.
                if record.stem in needed:
                    raise
                spoiled.append(record)
        if manifest.committed:
            info = manifest.committed[0]
            self.notes.append(f"found generation {info.id}, step {info.step}")
        self._note_new_paths(pool)
        self._fit_number(pool, spoiled)

    def _note_new_paths(self, pool: SlotPool) -> None:
        """Paths that were added since the files were made: the next generations are striped over them too."""
        used = {index for slot in pool.slots.values() for index in slot.where.values()}
        new = [folder.root for index, folder in enumerate(pool.folders) if used and index not in used]
        if new:
            pool.outdated = {slot.record.stem for slot in pool.slots.values() if not slot.record.is_frozen}
            self.notes.append(f"new: {', '.join(new)}; generations that are written from now on use it too")

    def _fit_number(self, pool: SlotPool, spoiled: Sequence[SlotRecord]) -> None:
        main = [slot for slot in pool.slots.values() if not slot.record.is_frozen]
        # Newest last, so that what is dropped is free or old.
        order = [record.slot.stem for record in pool.manifest.committed]
        main.sort(key=lambda slot: order.index(slot.record.stem) if slot.record.stem in order else len(order))
        surplus = main[self._generations :]
        missing = max(0, self._generations - len(main))
        stems = [f"gen-{serial}" for serial in self._serials(pool, missing)]
        if pool.frozen_shards and not any(slot.record.is_frozen for slot in pool.slots.values()):
            stems.append(FROZEN_STEM)
        if spoiled:
            pool.forget(spoiled)
            stems_text = ", ".join(sorted(record.stem for record in spoiled))
            self.notes.append(f"made anew: {stems_text}, which a crash had left unfinished")
        frozen = pool.manifest.frozen
        if frozen is not None:
            others = [slot for slot in pool.slots.values() if slot.record.is_frozen]
            surplus += [slot for slot in others if slot.record.stem != frozen.slot.stem]
        if surplus:
            pool.drop(surplus)
        if stems:
            pool.fresh(stems)

    @staticmethod
    def _serials(pool: SlotPool, number: int) -> list[int]:
        serials: list[int] = []
        for _ in range(number):
            serials.append(int(pool.next_stem(after=serials[-1] + 1 if serials else 0)[4:]))
        return serials


def read_sums(
    slot: Slot,
    sums_crc: Sequence[int],
    title: str,
    *,
    check: bool,
    progress: Callable[[int, int], None] | None = None,
) -> ChunkSums:
    """The checksums of a slot, checked against the manifest, and (check) its bytes against them."""
    tables = slot.read_tables()
    for stripe, table in enumerate(tables):
        found = crc32c(table) if table else 0
        if found != sums_crc[stripe]:
            path = str(slot.files[stripe].path)
            offset = slot.layout.sums_offsets[stripe]
            raise IntegrityError(
                f"{path}: the checksum table ({title}) at offset {offset:,} is damaged: CRC32C expected "
                f"{sums_crc[stripe]:08x}, found {found:08x}. Restore from a checkpoint",
                path=path,
                offset=offset,
                expected=sums_crc[stripe],
                found=found,
            )
    sums = ChunkSums.from_tables(slot.layout, tables)
    if check:
        verify(slot, sums, title, progress=progress)
    return sums


def table_crcs(sums: ChunkSums) -> tuple[int, ...]:
    """CRC32C of each stripe's checksum table, as the manifest keeps it."""
    return tuple(crc32c(table) if table else 0 for table in sums.tables())

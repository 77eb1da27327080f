"""The files of a store: which slots there are, on which paths, and the manifest that says so."""

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import SpaceError, StoreError, fault
from lamina.tiers.nvme.folder import RankFolder, sync_directory
from lamina.tiers.nvme.layout import Layout
from lamina.tiers.nvme.manifest import (
    FROZEN_STEM,
    MANIFEST_NAME,
    TEMPORARY_NAME,
    Manifest,
    SlotRecord,
    file_name,
    read_manifest,
    write_manifest,
)
from lamina.tiers.nvme.room import check_file_limit, file_too_large, plan_counts
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.striping import stripe_counts
from lamina.tiers.nvme.wear import Wear
from lamina.tiers.tier import NvmePath, ShardSpec

FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENXIO, errno.ENODEV)
"""Errors of one path that another path may make up for."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Those among them after which files that have their space can still be written."""


class SlotPool:
    """Creates, opens, replaces and removes slots. home: the folder of the manifest. Not thread safe."""

    def __init__(
        self,
        folders: Sequence[RankFolder],
        paths: Sequence[NvmePath],
        io: AsyncIO,
        wear: Wear,
        manifest: Manifest,
        home: int,
    ) -> None:
        self.folders = list(folders)
        self.paths = list(paths)
        self.io = io
        self.wear = wear
        self.manifest = manifest
        self.home = home
        self.left_homes: set[int] = set()
        self.slots: dict[str, Slot] = {}
        self.notes: list[str] = []
        self.doubt = ""
        self.failed: dict[int, OSError] = {}
        self.weights = [path.weight for path in paths]
        self.outdated: set[str] = set()
        self.left_out: frozenset[str] = frozenset()
        self.fronts: dict[str, int] = {}
        self._layouts: dict[SlotRecord, Layout] = {}

    @property
    def main_shards(self) -> tuple[ShardSpec, ...]:
        """What every generation holds from the next one on."""
        return self.record("", (1,)).held(self.manifest.shards)

    @property
    def frozen_shards(self) -> tuple[ShardSpec, ...]:
        """Shards that are written once."""
        return tuple(shard for shard in self.manifest.shards if shard.frozen)

    def layout(self, record: SlotRecord) -> Layout:
        """Layout of a slot's files."""
        key = replace(record, stem=FROZEN_STEM if record.is_frozen else "")
        if key not in self._layouts:
            self._layouts[key] = Layout(
                record.held(self.manifest.shards),
                counts=record.counts,
                chunk_bytes=self.manifest.chunk_bytes,
                fronts=dict(record.fronts),
            )
        return self._layouts[key]

    def save(self, manifest: Manifest) -> None:
        """Make a manifest the one that counts. Raises StorageFault; then the one before counts.

        If it fails after the rename, what is on disk decides. Where a path fails another one takes the manifest over. If
        none can, and what is on disk cannot be read either, `doubt` says so and the store has to be opened again.

        [Note: a manifest that moved] A path that failed may come back with the manifest that it had. Each one that is
        written has a higher revision than those before, so that the next opening knows which of them counts.
        """
        manifest = manifest.with_(revision=self.manifest.revision + 1)
        try:
            self._save_at(self.home, manifest)
        except OSError as error:
            self._save_elsewhere(manifest, error)
        self.doubt = ""
        self.manifest = manifest

    def _save_at(self, index: int, manifest: Manifest) -> None:
        """Write it on one path. Raises OSError; `doubt` then tells if it is not known whether it counts."""
        path = os.path.join(self.folders[index].path, MANIFEST_NAME)
        try:
            write_manifest(manifest, self.folders[index].path)
        except OSError as error:
            try:
                found = read_manifest(path)
            except (OSError, StoreError) as second:
                self.doubt = f"{path} could neither be written ({error}) nor read ({second})"
                raise
            if found is None or found.to_bytes() != manifest.to_bytes():
                raise
            self.notes.append(f"{path} was replaced, but making that durable failed: {error}")

    def _save_elsewhere(self, manifest: Manifest, error: OSError) -> None:
        """The manifest's path failed with this error: put it on another one. Raises StorageFault when there is none."""
        failed_path = os.path.join(self.folders[self.home].path, MANIFEST_NAME)
        others = [i for i in range(len(self.folders)) if i != self.home and i not in self.failed]
        for index in others if error.errno in FAULTS else ():
            try:
                self._save_at(index, manifest)
            except OSError as second:
                self.notes.append(f"{self.folders[index].path} cannot take the manifest over: {second}")
                continue
            self.notes.append(f"{failed_path} could not be written ({error}): moved to {self.folders[index].path}")
            if error.errno not in FULL:
                self.mark_failed(self.home, error)
            self.left_homes.add(self.home)
            self.left_homes.discard(index)
            with contextlib.suppress(OSError):
                self.folders[self.home].remove([MANIFEST_NAME, TEMPORARY_NAME])
            self.home = index
            return
        raise fault(error, f"writing {failed_path}", torn=self.manifest.updating is not None) from error

    def rooms(self, replacing: Sequence[Slot] = ()) -> list[int]:
        """Bytes that each path can take, counting what the removal of these slots gives back."""
        gain = [0] * len(self.folders)
        held = [0] * len(self.folders)
        for slot in self.slots.values():
            for stripe, index in slot.where.items():
                held[index] += slot.layout.file_bytes[stripe]
        for slot in replacing:
            given_back = slot.own_names_only() and not slot.holds
            for stripe, index in slot.where.items():
                held[index] -= slot.layout.file_bytes[stripe]
                gain[index] += slot.layout.file_bytes[stripe] if given_back else 0
        rooms = []
        for index, (folder, path) in enumerate(zip(self.folders, self.paths, strict=True)):
            room = folder.free_bytes() + gain[index]
            rooms.append(room if path.bytes is None else min(room, path.bytes - held[index]))
        return rooms

    def counts_for(self, number: int, frozen: bool, replacing: Sequence[Slot] = ()) -> tuple[int, ...]:
        """Stripe counts for `number` new generation files and, if asked, the frozen one. Raises
        SpaceError."""
        groups: list[tuple[Sequence[ShardSpec], int]] = [(self.main_shards, number)]
        if frozen:
            groups.append((self.frozen_shards, 1))
        return plan_counts(
            groups,
            weights=[0.0 if i in self.failed else weight for i, weight in enumerate(self.weights)],
            rooms=self.rooms(replacing),
            names=[folder.root for folder in self.folders],
            chunk_bytes=self.manifest.chunk_bytes,
            what=f"job {self.manifest.job!r} rank {self.manifest.rank}: {number} generation file(s)"
            f"{' and the frozen planes' if frozen else ''}",
        )

    def restripe(self, weights: Sequence[float]) -> int:
        """From now on files are made with these weights, and those that have other shares are made anew in their turn.

        Returns how many those are. Raises ValueError for what are no weights, SpaceError when files do not fit so.
        """
        if len(weights) != len(self.paths):
            raise ValueError(
                f"{len(weights)} stripe weights for {len(self.paths)} paths: give one for each, 0 to leave it out"
            )
        stripe_counts(weights)
        before, self.weights = self.weights, list(weights)
        main = [slot for slot in self.slots.values() if not slot.record.is_frozen]
        try:
            # As if all were made anew: what they take now is there for them.
            counts = self.counts_for(len(main), False, main)
        except SpaceError:
            self.weights = before
            raise
        self.outdated = {slot.record.stem for slot in main if self.counts_by_path(slot) != counts}
        return len(self.outdated)

    def counts_by_path(self, slot: Slot) -> tuple[int, ...]:
        """Chunks per path in one period of a slot's pattern."""
        counts = [0] * len(self.paths)
        for stripe, index in slot.where.items():
            counts[index] += slot.record.counts[stripe]
        return tuple(counts)

    def record(self, stem: str, counts: tuple[int, ...]) -> SlotRecord:
        """Of files that are to hold what a generation holds from now on."""
        record = SlotRecord(stem=stem, counts=counts)
        if record.is_frozen:
            return record
        return replace(record, left_out=tuple(sorted(self.left_out)), fronts=tuple(sorted(self.fronts.items())))

    def leave_out(self, names: Set[str], fronts: Mapping[str, int]) -> None:
        """From now on files are made without these shards and without the fronts of those; files that hold something else are
        made anew in their turn.

        Raises SpaceError, before anything was changed, when there is no room for such a file beside those that stay.
        """
        before = self.left_out, self.fronts
        self.left_out, self.fronts = frozenset(names), dict(fronts)
        committed = [record.slot.stem for record in self.manifest.committed]
        free = [
            slot for slot in self.slots.values() if not slot.record.is_frozen and slot.record.stem not in committed[:1]
        ]
        try:
            self.counts_for(1, False, free)
        except SpaceError:
            self.left_out, self.fronts = before
            raise

    def next_stem(self, after: int = 0) -> str:
        """A name for a generation file that no path has a file of, ours or foreign."""
        used = [slot.stem for slot in (*self.manifest.slots, *self.manifest.retired)]
        serial = max([after - 1, *(int(stem[4:]) for stem in used if stem.startswith("gen-"))]) + 1
        while any(
            os.path.lexists(os.path.join(folder.path, name)) for folder in self.folders for name in self._names(serial)
        ):
            serial += 1
        return f"gen-{serial}"

    def next_frozen_stem(self) -> str:
        """A name for files of frozen planes that replace others."""
        serial = 1
        while any(
            os.path.lexists(os.path.join(folder.path, file_name(f"{FROZEN_STEM}-{serial}", stripe)))
            for folder in self.folders
            for stripe in range(len(self.folders))
        ):
            serial += 1
        return f"{FROZEN_STEM}-{serial}"

    def _names(self, serial: int) -> list[str]:
        return [file_name(f"gen-{serial}", stripe) for stripe in range(len(self.folders))]

    def fresh(self, stems: Sequence[str], *, replacing: Sequence[Slot] = ()) -> list[Slot]:
        """New slots instead of others (which must not be the current one). The manifest names them before
        they exist, so that a crash leaves nothing that is not known as ours. A path that fails is left out
        from then on.

        Raises SpaceError or OSError; then the replaced slots are gone and no new one is left.
        """
        while True:
            numbered = [stem for stem in stems if not stem.startswith(FROZEN_STEM)]
            counts = self.counts_for(len(numbered), len(numbered) < len(stems), replacing)
            records = [self.record(stem, counts) for stem in stems]
            largest = max(nbytes for record in records for nbytes in self.layout(record).file_bytes)
            check_file_limit(largest, f"job {self.manifest.job!r} rank {self.manifest.rank}")
            self._announce(records, replacing)
            replacing = ()
            made: list[Slot] = []
            try:
                for record in records:
                    slot = Slot.create(record, self.layout(record), self.folders, self.io, self.wear)
                    made.append(slot)
                for index in {index for slot in made for index in slot.where.values()}:
                    sync_directory(self.folders[index].path)
                self.slots.update({slot.record.stem: slot for slot in made})
                return made
            except BaseException as error:
                for slot in made:
                    self.discard(slot)
                if not isinstance(error, OSError):
                    raise
                if error.errno == errno.EFBIG:
                    raise file_too_large(largest, f"job {self.manifest.job!r}", error) from error
                self.blame(error)

    def _announce(self, records: Sequence[SlotRecord], replacing: Sequence[Slot]) -> None:
        gone = {slot.record.stem for slot in replacing}
        new = {record.stem for record in records}
        kept = tuple(slot for slot in self.manifest.slots if slot.stem not in gone | new)
        # What is not there any more (given up by an earlier try) must not stay listed either.
        kept = tuple(slot for slot in kept if slot.stem in self.slots)
        retired = tuple(slot.record for slot in replacing)
        self.save(self.manifest.with_(slots=(*kept, *records), retired=(*self.manifest.retired, *retired)))
        for slot in replacing:
            self.discard(slot)
        self.save_retired()

    def save_retired(self) -> None:
        """Forget retired names whose files are gone (in memory; the next manifest says so on disk)."""
        left = tuple(record for record in self.manifest.retired if self._exists(record))
        self.manifest = self.manifest.with_(retired=left)

    def _exists(self, record: SlotRecord) -> bool:
        names = record.names().values()
        return any(os.path.lexists(os.path.join(folder.path, name)) for folder in self.folders for name in names)

    def discard(self, slot: Slot) -> None:
        """Remove a slot's names. A copy that still reads keeps its open files; a checkpoint keeps its own
        names."""
        self.slots.pop(slot.record.stem, None)
        for stripe, index in slot.where.items():
            self.folders[index].remove([slot.record.names()[stripe]])
        slot.give_up()

    def forget(self, records: Sequence[SlotRecord]) -> None:
        """Remove what there is of slots that are not open."""
        stems = {record.stem for record in records}
        kept = tuple(slot for slot in self.manifest.slots if slot.stem not in stems)
        self.save(self.manifest.with_(slots=kept, retired=(*self.manifest.retired, *records)))
        for record in records:
            for folder in self.folders:
                folder.remove(record.names().values())
        self.save_retired()

    def drop(self, slots: Sequence[Slot]) -> None:
        """Give up slots for good."""
        gone = {slot.record.stem for slot in slots}
        manifest = self.manifest
        self.save(
            manifest.with_(
                slots=tuple(slot for slot in manifest.slots if slot.stem not in gone),
                committed=tuple(record for record in manifest.committed if record.slot.stem not in gone),
                retired=(*manifest.retired, *(slot.record for slot in slots)),
            )
        )
        for slot in slots:
            self.discard(slot)
        self.save_retired()

    def writable(self, slot: Slot) -> bool:
        """Whether a slot's files may be written again: no checkpoint has them, no copy reads them, no path failed, and
        they hold what a generation is to hold and are not to be striped otherwise."""
        failed = set(slot.where.values()) & set(self.failed)
        other = slot.record != self.record(slot.record.stem, slot.record.counts)
        return slot.own_names_only() and not (slot.holds or failed or other or slot.record.stem in self.outdated)

    def keep_stripes(self, slot: Slot, error: SpaceError) -> bool:
        """Write a slot's files again as they are striped, because there is no room for others; False when that is not
        what kept them from being written."""
        if slot.record.stem not in self.outdated or slot.record.stem not in self.slots:
            return False
        self.outdated.remove(slot.record.stem)
        if self.writable(slot):
            self.notes.append(f"{slot.record.stem} keeps the stripes that it has: {error}")
        return self.writable(slot)

    def close(self, *, remove: bool) -> None:
        """Close all files; remove: delete them and the manifest."""
        slots = list(self.slots.values())
        for slot in slots:
            slot.drain()
            slot.close()
        self.slots = {}
        if remove:
            for index in (*self.left_homes, self.home):
                self.folders[index].remove([MANIFEST_NAME, TEMPORARY_NAME])
            for slot in slots:
                for stripe, index in slot.where.items():
                    self.folders[index].remove([slot.record.names()[stripe]])

    def blame(self, error: OSError, index: int | None = None) -> None:
        """Take the path that failed (by default the one the error names) out of use, if another can take over;
        otherwise raise the error."""
        index = self.index_of(error) if index is None else index
        usable = [i for i in range(len(self.paths)) if i not in self.failed and i != index]
        if index is None or error.errno not in FAULTS or not usable:
            raise error
        self.mark_failed(index, error)

    def mark_failed(self, index: int, error: OSError) -> None:
        """From now on nothing new is put on this path."""
        if index not in self.failed:
            self.failed[index] = error
            self.notes.append(
                f"{self.folders[index].root} failed ({error}): new generations use the other paths until the next start"
            )

    def index_of(self, error: OSError) -> int | None:
        """The path that an I/O error is about."""
        name = getattr(error, "path", None) or error.filename
        if name is None:
            return None
        for index, folder in enumerate(self.folders):
            if os.path.dirname(os.fspath(name)) == folder.path:
                return index
        return None

    def require_slot(self, record: SlotRecord) -> Slot:
        """An open slot. Raises StoreError when it is not one of ours."""
        try:
            return self.slots[record.stem]
        except KeyError:
            raise StoreError(f"slot {record.stem} is not open") from None

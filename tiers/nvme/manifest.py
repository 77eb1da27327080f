"""The manifest: one JSON file that says which generation counts, replaced atomically and checked by its own
CRC32C."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lamina.aio_native import crc32c
from lamina.tiers.errors import IntegrityError, LayoutError
from lamina.tiers.nvme.folder import sync_directory, sync_file
from lamina.tiers.nvme.layout import ALIGN, MOST_CHUNK_BYTES, shard_from_json, shard_to_json
from lamina.tiers.tier import ShardSpec

MANIFEST_NAME = "manifest.json"
TEMPORARY_NAME = "manifest.json.tmp"
FROZEN_STEM = "frozen"
MOST_STRIPES = 256
_VERSION = 1
_STEM = re.compile(r"gen-(0|[1-9][0-9]{0,17})|frozen(-[1-9][0-9]{0,17})?")


def file_name(stem: str, stripe: int) -> str:
    """Name of one stripe's file: gen-3.bin, gen-3.s1.bin ... Raises ValueError for a stem that is not
    ours."""
    if not _STEM.fullmatch(stem):
        raise ValueError(f"{stem!r} is not the name of a generation")
    return f"{stem}.bin" if stripe == 0 else f"{stem}.s{stripe}.bin"


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """The files of one slot: stem of their names, chunks per stripe in one period, and the shards that are not in them.

    fronts: of other shards, so many elements at the front are not in them either.
    """

    stem: str
    counts: tuple[int, ...]
    left_out: tuple[str, ...] = ()
    fronts: tuple[tuple[str, int], ...] = ()

    @property
    def is_frozen(self) -> bool:
        """Whether these files hold the planes that are written once."""
        return self.stem.startswith(FROZEN_STEM)

    def held(self, shards: Iterable[ShardSpec]) -> tuple[ShardSpec, ...]:
        """Of all shards of a store those in these files, with as many elements as are there."""
        fronts = dict(self.fronts)
        return tuple(
            replace(shard, numel=shard.numel - fronts.get(shard.name, 0))
            for shard in shards
            if shard.frozen == self.is_frozen and shard.name not in self.left_out
        )

    def names(self) -> dict[int, str]:
        """Stripe -> file name."""
        return {stripe: file_name(self.stem, stripe) for stripe, count in enumerate(self.counts) if count}


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """A committed generation. sums_crc: CRC32C of each stripe's checksum table (0 for a stripe without
    file)."""

    id: int
    step: int
    meta: Mapping[str, Any]
    durable: bool
    slot: SlotRecord
    sums_crc: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FrozenRecord:
    """The frozen planes, once they are written."""

    slot: SlotRecord
    sums_crc: tuple[int, ...]
    durable: bool


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reopening needs. committed: newest first. slots: the files that are ours, in use or free.

    retired: files that were ours and may still lie about. updating: an in-place update has begun and not
    ended. revision: counts what was written; of two manifests of one store the higher one counts (see
    [Note: a manifest that moved]).
    """

    store_id: str
    job: str
    rank: int
    chunk_bytes: int
    shards: tuple[ShardSpec, ...]
    generations: int
    committed: tuple[GenerationRecord, ...] = ()
    frozen: FrozenRecord | None = None
    slots: tuple[SlotRecord, ...] = ()
    retired: tuple[SlotRecord, ...] = ()
    updating: int | None = None
    revision: int = 0
    _shards_text: str = field(default="", compare=False, repr=False)

    def with_(self, **changes: Any) -> "Manifest":
        """A copy with some fields replaced."""
        return replace(self, **changes)

    @property
    def shards_text(self) -> str:
        """The shards as JSON, made once: with thousands of them it is most of the manifest."""
        if not self._shards_text:
            text = json.dumps([shard_to_json(shard) for shard in self.shards], separators=(",", ":"))
            object.__setattr__(self, "_shards_text", text)
        return self._shards_text

    def to_bytes(self) -> bytes:
        """JSON with the CRC32C of everything before it as the last member."""
        head = {
            "format": "lamina-generations",
            "version": _VERSION,
            "store_id": self.store_id,
            "job": self.job,
            "rank": self.rank,
            "chunk_bytes": self.chunk_bytes,
            "generations": self.generations,
            "committed": [_generation_to_json(record) for record in self.committed],
            "frozen": _frozen_to_json(self.frozen),
            "slots": [_slot_to_json(slot) for slot in self.slots],
            "retired": [_slot_to_json(slot) for slot in self.retired],
            "updating": self.updating,
            "revision": self.revision,
        }
        body = json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "shards": {self.shards_text}'
        return f'{body},\n "crc32c": "{crc32c(body.encode()):08x}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Parse and check. Raises IntegrityError for a damaged manifest, LayoutError for one that is not
        ours."""
        body, mark, tail = data.rpartition(b',\n "crc32c": "')
        try:
            expected = int(tail[:8], 16) if mark and tail[8:] == b'"\n}\n' else -1
        except ValueError:
            expected = -1
        found = crc32c(body)
        if expected != found:
            said = f"{expected:08x}" if expected >= 0 else "nothing readable"
            raise IntegrityError(
                f"{path}: the manifest is damaged: CRC32C says {said}, found {found:08x}. Restore from a checkpoint",
                path=path,
                expected=max(expected, 0),
                found=found,
            )
        try:
            manifest = _manifest_from_json(json.loads(data))
            _check_consistent(manifest)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"{path} is not a manifest that this version understands: {error!r}") from error
        return manifest


def _slot_to_json(slot: SlotRecord) -> dict[str, Any]:
    data: dict[str, Any] = {"stem": slot.stem, "counts": list(slot.counts)}
    if slot.left_out:
        data["left_out"] = list(slot.left_out)
    if slot.fronts:
        data["fronts"] = dict(slot.fronts)
    return data


def _generation_to_json(record: GenerationRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "step": record.step,
        "meta": dict(record.meta),
        "durable": record.durable,
        "slot": _slot_to_json(record.slot),
        "sums_crc": list(record.sums_crc),
    }


def _frozen_to_json(record: FrozenRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {"slot": _slot_to_json(record.slot), "sums_crc": list(record.sums_crc), "durable": record.durable}


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is not a whole number of at least {least}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list")
    return tuple(_whole(value) for value in values)


def _fronts(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} does not say how much of which shard")
    return tuple((name, _whole(numel, 1)) for name, numel in value.items())


def _slot_from_json(data: Any) -> SlotRecord:
    slot = SlotRecord(
        stem=_text(data["stem"]),
        counts=_wholes(data["counts"]),
        left_out=tuple(_text(name) for name in data.get("left_out", ())),
        fronts=_fronts(data.get("fronts", {})),
    )
    if len(slot.counts) > MOST_STRIPES or not 1 <= sum(slot.counts) <= MOST_STRIPES:
        raise ValueError(f"slot {slot.stem} has {len(slot.counts)} stripes with {sum(slot.counts)} chunks in a period")
    file_name(slot.stem, 0)  # what is not one of our names must not become a path
    return slot


def _generation_from_json(data: Any) -> GenerationRecord:
    if not isinstance(data["meta"], dict) or type(data["durable"]) is not bool:
        raise ValueError("a generation's meta or durable has the wrong type")
    return GenerationRecord(
        id=_whole(data["id"]),
        step=_whole(data["step"]),
        meta=data["meta"],
        durable=data["durable"],
        slot=_slot_from_json(data["slot"]),
        sums_crc=_wholes(data["sums_crc"]),
    )


def _frozen_from_json(data: Any) -> FrozenRecord | None:
    if data is None:
        return None
    slot = _slot_from_json(data["slot"])
    return FrozenRecord(slot=slot, sums_crc=_wholes(data["sums_crc"]), durable=bool(data["durable"]))


def _manifest_from_json(data: Any) -> Manifest:
    if data["format"] != "lamina-generations" or data["version"] != _VERSION:
        raise ValueError(f"format {data['format']!r} version {data['version']!r}, wanted version {_VERSION}")
    return Manifest(
        store_id=_text(data["store_id"]),
        job=_text(data["job"]),
        rank=_whole(data["rank"]),
        chunk_bytes=_whole(data["chunk_bytes"], 1),
        generations=_whole(data["generations"], 1),
        committed=tuple(_generation_from_json(item) for item in data["committed"]),
        frozen=_frozen_from_json(data["frozen"]),
        slots=tuple(_slot_from_json(item) for item in data["slots"]),
        retired=tuple(_slot_from_json(item) for item in data["retired"]),
        updating=None if data["updating"] is None else _whole(data["updating"]),
        revision=_whole(data.get("revision", 0)),
        shards=tuple(shard_from_json(item) for item in data["shards"]),
    )


def _check_consistent(manifest: Manifest) -> None:
    """Raise ValueError for a manifest that no store has written: what it says is deleted, linked and read by."""
    stems = [slot.stem for slot in (*manifest.slots, *manifest.retired)]
    if twice := {stem for stem in stems if stems.count(stem) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is listed twice, in use or to be removed")
    if manifest.chunk_bytes % ALIGN or manifest.chunk_bytes > MOST_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {manifest.chunk_bytes}")
    names = [shard.name for shard in manifest.shards]
    if len(set(names)) != len(names):
        raise ValueError("a shard is listed twice")
    numels = {shard.name: shard.numel for shard in manifest.shards if not shard.frozen}
    for slot in (*manifest.slots, *(record.slot for record in manifest.committed)):
        if any(numel >= numels.get(name, 0) for name, numel in slot.fronts):
            raise ValueError(f"{slot.stem} lacks fronts that no shard has: {slot.fronts!r}")
    ids = [record.id for record in manifest.committed]
    if ids != sorted(set(ids), reverse=True):
        raise ValueError(f"generations are listed as {ids}, not newest first")
    frozen = [manifest.frozen] if manifest.frozen else []
    for slot in [*(record.slot for record in manifest.committed[:1]), *(f.slot for f in frozen)]:
        if slot not in manifest.slots:
            raise ValueError(f"{slot.stem} counts, but is not among the slots")
    if any(record.slot.is_frozen for record in manifest.committed) or not all(f.slot.is_frozen for f in frozen):
        raise ValueError("a slot is listed as what it is not")
    sums = [(r.slot, r.sums_crc) for r in manifest.committed] + [(f.slot, f.sums_crc) for f in frozen]
    for slot, crcs in sums:
        if len(crcs) != len(slot.counts):
            raise ValueError(f"{slot.stem} has {len(crcs)} checksums for {len(slot.counts)} stripes")


def read_manifest(path: str) -> Manifest | None:
    """The manifest at path, or None when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return Manifest.from_bytes(file.read(), path)


def write_manifest(manifest: Manifest, folder: str) -> None:
    """Replace the folder's manifest: afterwards it is the new one, durably; if this fails or dies, the old
    one.

    Raises OSError; ENOSPC and the like leave the old manifest in place.
    """
    write_temporary(manifest, folder)
    publish_temporary(folder)


def publish_temporary(folder: str) -> None:
    """Make the temporary manifest the one that counts, durably."""
    os.rename(os.path.join(folder, TEMPORARY_NAME), os.path.join(folder, MANIFEST_NAME))
    sync_directory(folder)


def write_temporary(manifest: Manifest, folder: str, *, durable: bool = True) -> None:
    """Write a manifest that does not count yet; without durable, sync_temporary() has to follow before it may count."""
    temporary = os.path.join(folder, TEMPORARY_NAME)
    data = memoryview(manifest.to_bytes())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def sync_temporary(folder: str) -> None:
    """Make the temporary manifest durable."""
    sync_file(os.path.join(folder, TEMPORARY_NAME))

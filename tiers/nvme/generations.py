"""Which generations are committed, which files hold them, and which files the next one is written to."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lamina.tiers.errors import IntegrityError, SpaceError, StoreError, fault
from lamina.tiers.nvme.chunk_sums import ChunkSums
from lamina.tiers.nvme.manifest import FrozenRecord, GenerationRecord, Manifest
from lamina.tiers.nvme.opening import read_sums, table_crcs
from lamina.tiers.nvme.slot import Slot
from lamina.tiers.nvme.slot_pool import SlotPool
from lamina.tiers.nvme.source import Source
from lamina.tiers.nvme.transaction import Target


class Generations:
    """The committed generations of a store and the rotation of their files. Not thread safe: its owner locks.

    committed: newest first. torn: an in-place update was cut, so there is no whole generation.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.committed = list(pool.manifest.committed)
        self.torn = False
        self.frozen_names = frozenset(shard.name for shard in pool.frozen_shards)
        self._pool = pool
        self._sums: dict[str, ChunkSums] = {}

    @property
    def current(self) -> GenerationRecord | None:
        """The generation that counts, if there is one."""
        return self.committed[0] if self.committed else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Those of the committed generations."""
        return tuple(record.step for record in self.committed)

    def require_alike(self, step: int) -> None:
        """Raise StoreError where the generation of a step that is kept holds something else than the next one is to."""
        for record in self.committed:
            if record.step == step and record.slot.held(self._pool.manifest.shards) != self._pool.main_shards:
                raise StoreError(f"generation {record.id}, step {step}, holds other shards than those that are wanted")

    def load(self, progress: Callable[[int, int], None] | None, at_step: int | None, *, check: bool) -> None:
        """Read the checksums and (check) compare every byte with them; at_step: from that generation on. Raises IntegrityError,
        StoreError; then another one is not yet the current one."""
        committed = self.committed
        if at_step is not None:
            if at_step not in self.steps:
                raise StoreError(f"no generation of step {at_step} is kept; there is: {list(self.steps) or 'none'}")
            committed = committed[self.steps.index(at_step) :]
        if committed:
            record = committed[0]
            slot = self._pool.require_slot(record.slot)
            title = f"generation {record.id}, step {record.step}"
            check_it = check or at_step is not None
            try:
                sums = read_sums(slot, record.sums_crc, title, check=check_it, progress=progress)
            except IntegrityError as error:
                if len(committed) > 1:
                    error.add_hint(f"or try the generation before it: open with at_step={committed[1].step}")
                raise
            self._sums[record.slot.stem] = sums
        frozen = self._pool.manifest.frozen
        if frozen is not None:
            slot = self._pool.require_slot(frozen.slot)
            sums = read_sums(slot, frozen.sums_crc, "frozen planes", check=check, progress=progress)
            self._sums[frozen.slot.stem] = sums
        self.committed = committed

    def readable(self, shard: str) -> tuple[Slot, ChunkSums, str]:
        """Where the current bytes of a shard are, their checksums, and what they are called. Raises StoreError."""
        manifest = self._pool.manifest
        if shard in self.frozen_names:
            if manifest.frozen is None:
                raise StoreError(
                    f"shard {shard} is frozen and was not written yet: commit a transaction that writes it"
                )
            stem, title = manifest.frozen.slot.stem, "frozen planes"
        else:
            if not self.committed:
                raise StoreError(f"nothing was committed yet, so {shard} cannot be read")
            record = self.committed[0]
            stem, title = record.slot.stem, f"generation {record.id}, step {record.step}"
        return self._pool.slots[stem], self._sums[stem], title

    def source(self) -> Source | None:
        """What an update carries over from."""
        if not self.committed:
            return None
        record = self.committed[0]
        title = f"generation {record.id}, step {record.step}"
        return Source(slot=self._pool.slots[record.slot.stem], sums=self._sums[record.slot.stem], title=title)

    def main_target(self, source: Source | None) -> Target:
        """Where the next generation is to be written. Raises SpaceError, StorageFault, OSError."""
        pool = self._pool
        in_place = source if pool.manifest.generations == 1 else None
        if in_place is not None and pool.writable(in_place.slot):
            return _overwriting(in_place)
        old = self._next_in_turn(source)
        if old is not None and pool.writable(old):
            return self._over(old)
        try:
            (new,) = pool.fresh([pool.next_stem()], replacing=[old] if old else [])
        except SpaceError as error:
            if in_place is not None and pool.keep_stripes(in_place.slot, error):
                return _overwriting(in_place)
            if old is not None and pool.keep_stripes(old, error):
                return self._over(old)
            raise SpaceError(
                f"{error}. A checkpoint shares the files that would be next, so new ones are needed: removing an old "
                "checkpoint helps too",
                wanted=error.wanted,
                free=error.free,
            ) from error
        if old is not None:
            self._forget(old.record.stem)
        return Target(slot=new, sums=ChunkSums(new.layout))

    def _next_in_turn(self, source: Source | None) -> Slot | None:
        """The free slot, or the one with the oldest generation that is not the current one."""
        age = {record.slot.stem: -record.id for record in self.committed}
        slots = [slot for slot in self._pool.slots.values() if not slot.record.is_frozen]
        others = [slot for slot in slots if source is None or slot is not source.slot]
        return max(others, key=lambda slot: age.get(slot.record.stem, 1), default=None)

    def _over(self, slot: Slot) -> Target:
        slot.drain()
        self._forget(slot.record.stem)
        return Target(slot=slot, sums=ChunkSums(slot.layout))

    def _forget(self, stem: str) -> None:
        """What is about to be overwritten is no generation any more."""
        self.committed = [record for record in self.committed if record.slot.stem != stem]

    def frozen_target(self, *, replace: bool) -> Target | None:
        """Where frozen planes are to be written, if they are: the first time, or to replace them."""
        if not self.frozen_names or (self._pool.manifest.frozen is not None and not replace):
            return None
        if replace and self._pool.manifest.frozen is not None:
            (slot,) = self._pool.fresh([self._pool.next_frozen_stem()])
        else:
            slot = next(slot for slot in self._pool.slots.values() if slot.record.is_frozen)
        return Target(slot=slot, sums=ChunkSums(slot.layout))

    def first_write(self, target: Target) -> None:
        """Say on disk that an in-place update has begun, so that a crash is noticed."""
        if target.in_place:
            self._pool.save(self._pool.manifest.with_(updating=self.committed[0].id + 1))
            self.torn = True

    def replace_slot(self, slot: Slot, stripe: int, error: OSError) -> Slot:
        """A slot without the path that failed. Raises StorageFault when there can be none."""
        try:
            self._pool.blame(error, slot.where[stripe])
            stem = self._pool.next_frozen_stem() if slot.record.is_frozen else self._pool.next_stem()
            (new,) = self._pool.fresh([stem])
        except (OSError, SpaceError) as second:
            said = "a write" if second is error else f"a write (and no other path could take over: {second})"
            raise fault(error, said) from second
        return new

    def publish(self, targets: Iterable[Target], step: int, meta: Mapping[str, Any], durable: bool) -> None:
        """The atomic commit. Raises StorageFault."""
        manifest = self._pool.manifest
        frozen = manifest.frozen
        main: Target | None = None
        for target in targets:
            if target.slot.record.is_frozen:
                frozen = FrozenRecord(slot=target.slot.record, sums_crc=table_crcs(target.sums), durable=durable)
            else:
                main = target
        if main is None:
            raise StoreError("a transaction without files")
        last = self.committed[0].id if self.committed else 0
        record = GenerationRecord(
            id=last + 1,
            step=step,
            meta=meta,
            durable=durable,
            slot=main.slot.record,
            sums_crc=table_crcs(main.sums),
        )
        older = [old for old in self.committed if old.slot.stem != record.slot.stem]
        kept = older[: max(0, manifest.generations - 1)]
        self._pool.save(manifest.with_(committed=(record, *kept), frozen=frozen, updating=None))
        self.committed = [record, *kept]
        self._sums = {target.slot.record.stem: target.sums for target in targets} | {
            stem: sums for stem, sums in self._sums.items() if stem == (frozen.slot.stem if frozen else "")
        }
        self.torn = False
        self.tidy(self._drop_surplus)

    def pinned(self) -> tuple[Manifest, list[tuple[Slot, ChunkSums]]]:
        """The manifest of the current generation alone, as of a time when it is durable, and its files. Raises StoreError."""
        if not self.committed:
            raise StoreError("nothing was committed yet, so there is nothing to pin")
        manifest = self._pool.manifest
        record = replace(self.committed[0], durable=True)
        frozen = manifest.frozen and replace(manifest.frozen, durable=True)
        stems = [record.slot.stem, *([frozen.slot.stem] if frozen else [])]
        sources = [(self._pool.slots[stem], self._sums[stem]) for stem in stems]
        # Whoever reads a checkpoint finds in it what it holds, and nothing of what once could be there.
        held = {shard.name: shard for shard in record.slot.held(manifest.shards)}
        record = replace(record, slot=replace(record.slot, left_out=(), fronts=()))
        alone = Manifest(
            store_id=manifest.store_id,
            job=manifest.job,
            rank=manifest.rank,
            chunk_bytes=manifest.chunk_bytes,
            shards=tuple(
                held.get(shard.name, shard) for shard in manifest.shards if shard.frozen or shard.name in held
            ),
            generations=manifest.generations,
            committed=(record,),
            frozen=frozen,
            slots=tuple(replace(slot.record, left_out=(), fronts=()) for slot, _ in sources),
        )
        return alone, sources

    def tidy(self, work: Callable[[], None]) -> None:
        """Remove what is not needed any more. That it failed is no failure of what was done before: it is noted."""
        try:
            work()
        except (OSError, StoreError) as error:
            self._pool.notes.append(f"not removed: {error}")

    def drop_unused_frozen(self) -> None:
        """Remove files of frozen planes that no manifest counts on."""
        frozen = self._pool.manifest.frozen
        if frozen is not None:
            slots = self._pool.slots.values()
            unused = [slot for slot in slots if slot.record.is_frozen and slot.record.stem != frozen.slot.stem]
            if unused:
                self._pool.drop(unused)

    def _drop_surplus(self) -> None:
        """Keep as many slots as there are generations, the committed ones first."""
        pool = self._pool
        order = [record.slot.stem for record in self.committed]
        main = [slot for slot in pool.slots.values() if not slot.record.is_frozen]
        main.sort(key=lambda slot: order.index(slot.record.stem) if slot.record.stem in order else len(order))
        surplus = main[pool.manifest.generations :]
        if surplus:
            gone = {slot.record.stem for slot in surplus}
            self.committed = [record for record in self.committed if record.slot.stem not in gone]
            pool.drop(surplus)

    def shares(self) -> tuple[float, ...]:
        """Each path's share of the chunks of the current generation, or of the first to come."""
        stem = self.committed[0].slot.stem if self.committed else None
        main = [slot for slot in self._pool.slots.values() if not slot.record.is_frozen]
        counts = self._pool.counts_by_path(next((slot for slot in main if slot.record.stem == stem), main[0]))
        return tuple(count / sum(counts) for count in counts)


def _overwriting(source: Source) -> Target:
    """The files of the current generation, to be updated in place."""
    source.slot.drain()
    return Target(slot=source.slot, sums=ChunkSums(source.slot.layout, source.sums.values[:]), in_place=True)

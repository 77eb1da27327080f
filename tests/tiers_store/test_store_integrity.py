"""Damage on disk is found and named: flipped bits, wrong lengths, missing files, a spoiled manifest."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import CHUNK, FROZEN, SHARDS, random_state, rank_folder, read_all, write_all

from lamina.tiers.errors import IntegrityError, LayoutError, StoreError
from lamina.tiers.nvme.layout import Layout
from lamina.tiers.nvme.manifest import Manifest, SlotRecord, file_name
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane

Open = Callable[..., GenerationStore]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def current_file(store: GenerationStore) -> Path:
    """The file of the only stripe of the current generation."""
    return Path(store._pool.slots[store._generations.committed[0].slot.stem].paths()[0])


@pytest.mark.parametrize(
    ("shard", "plane"), [("block0", Plane.PARAM), ("block3", Plane.EXP_AVG), ("block2", Plane.PARAM)]
)
@pytest.mark.parametrize("verify", ["resume", "always"])
def test_a_flipped_bit_is_named_on_resume(open_store: Open, shard: str, plane: Plane, verify: str) -> None:
    store = open_store()
    write_all(store, random_state(), 3)
    path = current_file(store)
    store.close()
    extent = Layout(SHARDS, chunk_bytes=CHUNK).extent(shard, plane)
    chunk = extent.num_chunks - 1
    flip(path, extent.starts[0] + extent.nbytes - 1, 6)
    with pytest.raises(IntegrityError) as caught:
        open_store(verify=verify)
    error = caught.value
    assert (error.path, error.offset, error.chunk) == (str(path), extent.starts[0] + chunk * CHUNK, chunk)
    assert (error.shard, error.plane) == (shard, plane)
    assert error.expected != error.found
    for text in (str(path), f"{shard}/{plane}", "step 3", f"{error.expected:08x}", f"{error.found:08x}", "checkpoint"):
        assert text in str(error)


def test_always_checks_every_whole_chunk_that_is_read(open_store: Open) -> None:
    store = open_store(verify="always")
    state = random_state()
    write_all(store, state, 0)
    extent = Layout(SHARDS, chunk_bytes=CHUNK).extent("block3", Plane.EXP_AVG)
    flip(current_file(store), extent.starts[0] + 5 * CHUNK + 17)
    handle = store.read("block3", Plane.EXP_AVG, bytearray(extent.nbytes))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="chunk 5 of block3/exp_avg"):
            handle.wait()
    part = bytearray(5 * CHUNK)
    store.read("block3", Plane.EXP_AVG, part).wait()
    assert part == state["block3", Plane.EXP_AVG][: 5 * CHUNK]
    with store.begin() as transaction, pytest.raises(IntegrityError, match="chunk 5 of block3/exp_avg"):
        transaction.copy_rest()
    assert store.current is not None
    assert store.current.id == 1


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(5 * CHUNK + 100, 10), (5 * CHUNK + 100, CHUNK), (4 * CHUNK + 1, CHUNK), (0, 5 * CHUNK + 1)]
)
def test_always_checks_chunks_that_are_read_in_part(open_store: Open, offset: int, nbytes: int) -> None:
    store = open_store(verify="always")
    state = random_state()
    write_all(store, state, 0)
    extent = Layout(SHARDS, chunk_bytes=CHUNK).extent("block3", Plane.EXP_AVG)
    buffer = bytearray(nbytes)
    store.read("block3", Plane.EXP_AVG, buffer, offset=offset).wait()
    assert buffer == state["block3", Plane.EXP_AVG][offset : offset + nbytes]
    flip(current_file(store), extent.starts[0] + 5 * CHUNK + 4000)
    with pytest.raises(IntegrityError, match="chunk 5 of block3/exp_avg"):
        store.read("block3", Plane.EXP_AVG, buffer, offset=offset).wait()


def test_a_read_that_is_waited_for_late_is_that_of_its_generation(open_store: Open) -> None:
    """Two commits later its file holds other bytes; the handle has the old ones, checked."""
    store = open_store(verify="always")
    state = random_state()
    write_all(store, state, 0)
    buffer = bytearray(1000)
    handle = store.read("block3", Plane.EXP_AVG, buffer, offset=500)
    while not handle.done():
        time.sleep(0.001)
    assert read_all(store) == state  # more reads, which must not make the store forget the first
    for step in range(1, 4):
        write_all(store, random_state(), step)
    assert handle.wait() == 1000
    assert buffer == state["block3", Plane.EXP_AVG][500:1500]


def test_damage_that_is_carried_over_stays_visible(open_store: Open) -> None:
    store = open_store(verify="off")
    write_all(store, random_state(), 0)
    extent = Layout(SHARDS, chunk_bytes=CHUNK).extent("block3", Plane.EXP_AVG)
    flip(current_file(store), extent.starts[0] + 5 * CHUNK + 17)
    with store.begin() as transaction:
        transaction.copy_rest()
        transaction.commit(1)
    store.close()
    with pytest.raises(IntegrityError, match=r"chunk 5 of block3/exp_avg .*step 1"):
        open_store()


def test_every_bit_of_a_small_generation_is_guarded(open_store: Open) -> None:
    """Any byte of any plane, and of the checksum table."""
    store = open_store()
    write_all(store, random_state(), 0)
    path = current_file(store)
    store.close()
    layout = Layout(SHARDS, chunk_bytes=CHUNK)
    generator = random.Random(0)
    places = [
        extent.starts[0] + generator.randrange(extent.nbytes) for extent in layout.extents.values() if extent.nbytes
    ]
    places += [layout.sums_offsets[0] + generator.randrange(layout.sums_bytes[0]) for _ in range(5)]
    for place in places:
        bit = generator.randrange(8)
        flip(path, place, bit)
        with pytest.raises(IntegrityError) as caught:
            open_store()
        assert caught.value.offset <= place
        flip(path, place, bit)
    open_store()


def test_padding_does_not_matter(open_store: Open) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    path = current_file(store)
    store.close()
    flip(path, 100)  # behind block0/param, which has 2 bytes
    assert read_all(open_store()) == state


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["truncated", "lengthened", "missing"])
def test_a_file_of_the_wrong_length_is_named(open_store: Open, tmp_path: Path, how: str, frozen: bool) -> None:
    shards = (*SHARDS, FROZEN)
    store = open_store(shards=shards)
    write_all(store, random_state(shards), 0)
    path = rank_folder(tmp_path) / "frozen.bin" if frozen else current_file(store)
    store.close()
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, size - 1 if how == "truncated" else size + 1)
    with pytest.raises(IntegrityError, match=how) as caught:
        open_store(shards=shards)
    assert caught.value.path == str(path)
    if how != "missing":
        assert (caught.value.expected, caught.value.found) == (size, path.stat().st_size)


def test_a_free_slot_needs_no_repair(open_store: Open, tmp_path: Path) -> None:
    """What a crash left of a file without a generation in it is made anew."""
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    spare = next(path for path in rank_folder(tmp_path).glob("gen-*.bin") if path != current_file(store))
    for damage in ("truncate", "unlink"):
        store.close()
        os.truncate(spare, 5) if damage == "truncate" else spare.unlink()
        store = open_store()
        assert "made anew" in store.report()
        assert read_all(store) == state
        state = random_state()
        write_all(store, state, 1)
        state = random_state()
        write_all(store, state, 2)
        assert len(list(rank_folder(tmp_path).glob("gen-*.bin"))) == 2
        spare = next(path for path in rank_folder(tmp_path).glob("gen-*.bin") if path != current_file(store))


def test_a_missing_path_is_named(open_store: Open, tmp_path: Path) -> None:
    paths = [NvmePath(path=str(tmp_path / "a")), NvmePath(path=str(tmp_path / "b"))]
    store = open_store(paths)
    write_all(store, random_state(), 0)
    store.close()
    with pytest.raises(IntegrityError, match=r"gen-0\.s1\.bin is missing: looked for .*Give every path in tiers\.nvme"):
        open_store(paths[:1])


def test_paths_may_change_their_order_and_grow(open_store: Open, tmp_path: Path) -> None:
    paths = [NvmePath(path=str(tmp_path / name)) for name in "abc"]
    store = open_store(paths[:2])
    state = random_state()
    write_all(store, state, 0)
    store.close()
    store = open_store([paths[1], paths[0]])
    assert read_all(store) == state
    state = random_state()
    write_all(store, state, 1)
    store.close()
    store = open_store([paths[2], paths[1], paths[0]])
    assert read_all(store) == state
    assert f"new: {paths[2].path}; generations that are written from now on use it too" in store.report()
    for step in range(2, 6):
        state = random_state()
        write_all(store, state, step)
        assert read_all(store) == state
    assert store.wear()[0].step_written > 0
    assert len(list(Path(paths[2].path).rglob("gen-*.bin"))) == 2
    store.close()
    assert "new:" not in open_store(paths).report()


def test_every_byte_of_the_manifest_is_guarded(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    write_all(store, random_state(), 0, meta={"note": "ü"})
    store.close()
    path = rank_folder(tmp_path) / "manifest.json"
    good = path.read_bytes()
    for place in range(0, len(good), 37):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(IntegrityError, match="the manifest is damaged"):
            open_store()
    for size in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(IntegrityError, match="the manifest is damaged"):
            open_store()
    path.write_bytes(good)
    assert open_store().current is not None


@pytest.mark.parametrize(
    "name", ["../../gen-0", "gen-0/../../x", "/etc/passwd", "gen-01", "gen-", "lock", "gen-0.bin", "frozen-0"]
)
def test_no_path_is_taken_from_a_manifest(name: str) -> None:
    """A manifest with a right checksum but a slot name that is not ours."""
    manifest = Manifest(
        store_id="x",
        job="j",
        rank=0,
        chunk_bytes=CHUNK,
        shards=SHARDS,
        generations=2,
        slots=(SlotRecord(stem=name, counts=(1,)),),
    )
    with pytest.raises(ValueError, match="not the name of a generation"):
        file_name(name, 0)
    with pytest.raises(LayoutError, match="not the name of a generation"):
        Manifest.from_bytes(manifest.to_bytes(), "manifest.json")


def test_manifests_survive_json() -> None:
    manifest = Manifest(
        store_id="x", job='q"\n', rank=3, chunk_bytes=CHUNK, shards=(*SHARDS, FROZEN), generations=2, updating=4
    )
    assert Manifest.from_bytes(manifest.to_bytes(), "p") == manifest


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": object()}])
def test_meta_that_json_cannot_hold_is_refused(open_store: Open, meta: dict[str, object]) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 0)
    with pytest.raises((TypeError, ValueError)):
        write_all(store, random_state(), 1, meta=meta)
    assert read_all(store) == state
    write_all(store, random_state(), 1)


def test_progress_and_off(open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    path = current_file(store)
    store.close()
    seen: list[tuple[int, int]] = []
    open_store(progress=lambda done, total: seen.append((done, total))).close()
    total = Layout(SHARDS, chunk_bytes=CHUNK).payload_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    flip(path, 0)
    assert read_all(open_store(verify="off"))["block0", Plane.PARAM]


def test_two_stores_are_not_mixed(open_store: Open, tmp_path: Path) -> None:
    paths = [NvmePath(path=str(tmp_path / "a")), NvmePath(path=str(tmp_path / "b"))]
    for path in paths:
        open_store([path]).close()
    with pytest.raises(LayoutError, match="manifests of separate stores"):
        open_store(paths)


def test_a_store_that_failed_to_open_is_unlocked(open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    path = current_file(store)
    store.close()
    flip(path, 0)
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged"):
            open_store()

"""Writing, reading, committing and reopening generations."""

import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import CHUNK, FROZEN, SHARDS, State, random_state, rank_folder, read_all, write_all

from lamina.tiers.errors import LayoutError, StoreError
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane, ShardSpec

Open = Callable[..., GenerationStore]


def two_paths(tmp_path: Path) -> list[NvmePath]:
    return [NvmePath(path=str(tmp_path / "disk a"), weight=2), NvmePath(path=str(tmp_path / "disk é"))]


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("generations", [1, 2, 3])
@pytest.mark.parametrize("verify", ["always", "off"])
def test_every_generation_reads_back_after_reopening(
    tmp_path: Path, open_store: Open, striped: bool, generations: int, verify: str
) -> None:
    paths = two_paths(tmp_path) if striped else None
    shards = (*SHARDS, FROZEN)
    state = random_state(shards)
    for step in range(5):
        store = open_store(paths, shards=shards, generations=generations, verify=verify)
        if step == 0:
            assert store.current is None
            write_all(store, state, step, meta={"loss": 0.5})
        else:
            fresh = random_state(SHARDS)
            write_all(store, fresh, step, meta={"loss": 0.5}, durable=step % 2 == 1)
            state |= fresh
        assert store.current is not None
        assert (store.current.id, store.current.step, store.current.meta) == (step + 1, step, {"loss": 0.5})
        assert read_all(store) == state
        store.close()
    assert read_all(open_store(paths, shards=shards, generations=generations, verify=verify)) == state


@pytest.mark.parametrize("striped", [False, True])
def test_pieces_of_any_size_and_order_make_the_same_plane(tmp_path: Path, open_store: Open, striped: bool) -> None:
    """Random, overlapping, unaligned writes against a bytearray; the last one wins."""
    generator = random.Random(5)
    store = open_store(two_paths(tmp_path) if striped else None, verify="always")
    for step in range(4):
        expected = {key: bytearray(data) for key, data in random_state().items()}
        with store.begin() as transaction:
            for (shard, plane), data in expected.items():
                borders = sorted({0, len(data), *(generator.randrange(len(data) + 1) for _ in range(7))})
                spans = list(itertools.pairwise(borders))
                generator.shuffle(spans)
                for start, end in spans:
                    transaction.write(shard, plane, bytes(data[start:end]), offset=start)
                for _ in range(5):
                    start = generator.randrange(len(data) + 1)
                    piece = generator.randbytes(generator.randrange(len(data) - start + 1))
                    transaction.write(shard, plane, piece, offset=start)
                    data[start : start + len(piece)] = piece
                back = bytearray(len(data))
                transaction.read(shard, plane, back).wait()
                assert back == data
            transaction.commit(step)
        assert read_all(store) == {key: bytes(data) for key, data in expected.items()}
    store.close()
    assert read_all(open_store(two_paths(tmp_path) if striped else None)) == expected


def test_a_read_of_any_part(tmp_path: Path, open_store: Open) -> None:
    store = open_store(two_paths(tmp_path), verify="always")
    state = random_state()
    write_all(store, state, 1)
    generator = random.Random(3)
    data = state["block3", Plane.EXP_AVG]
    for _ in range(50):
        start = generator.randrange(len(data) + 1)
        size = generator.randrange(len(data) - start + 1)
        buffer = bytearray(size)
        handle = store.read("block3", Plane.EXP_AVG, buffer, offset=start)
        assert handle.wait() == size == handle.wait()
        assert buffer == data[start : start + size]


@pytest.mark.parametrize("generations", [1, 2, 3])
@pytest.mark.parametrize("verify", ["always", "off"])
def test_what_was_not_written_is_carried_over(open_store: Open, generations: int, verify: str) -> None:
    store = open_store(generations=generations, verify=verify)
    state = random_state()
    write_all(store, state, 0)
    generator = random.Random(1)
    for step in range(1, 8):
        with store.begin() as transaction:
            for (shard, plane), data in state.items():
                if len(data) < 2 or generator.random() < 0.4:
                    continue
                start = generator.randrange(len(data))
                piece = generator.randbytes(generator.randrange(1, len(data) - start + 1))
                transaction.write(shard, plane, piece, offset=start)
                state[shard, plane] = data[:start] + piece + data[start + len(piece) :]
            transaction.copy_rest()
            transaction.commit(step)
        assert read_all(store) == state
    store.close()
    assert read_all(open_store(generations=generations)) == state


def test_a_commit_names_what_is_missing(open_store: Open) -> None:
    store = open_store()
    transaction = store.begin()
    with pytest.raises(StoreError, match=r"not written: block0/param, block0/exp_avg, block1/param.*copy_rest"):
        transaction.commit(1)
    with pytest.raises(StoreError, match="nothing was committed yet"):
        transaction.copy_rest()
    for shard, plane in random_state():
        if (shard, plane) != ("block2", Plane.EXP_AVG):
            spec = next(s for s in SHARDS if s.name == shard)
            transaction.write(shard, plane, bytes(spec.plane_bytes(plane)))
    transaction.write("block2", Plane.EXP_AVG, bytes(4096), offset=4096)
    assert transaction.missing() == ["block2/exp_avg"]
    with pytest.raises(StoreError, match="not written: block2/exp_avg"):
        transaction.commit(1)
    transaction.write("block2", Plane.EXP_AVG, bytes(4 * 4097))
    transaction.commit(1)
    assert store.current is not None


@pytest.mark.parametrize("end", ["abort", "exception", "close"])
def test_an_update_that_does_not_commit_leaves_no_trace(open_store: Open, end: str) -> None:
    store = open_store()
    state = random_state()
    write_all(store, state, 7)
    transaction = store.begin()
    transaction.write("block1", Plane.PARAM, os.urandom(2000))
    if end == "exception":
        with pytest.raises(KeyError), transaction:
            transaction.write("nobody", Plane.PARAM, b"")
    else:
        transaction.write("block3", Plane.PARAM, os.urandom(40_022))
        transaction.abort() if end == "abort" else store.close()
    if end != "close":
        assert read_all(store) == state
        store.close()
    again = open_store()
    assert again.current is not None
    assert again.current.step == 7
    assert read_all(again) == state
    with pytest.raises(StoreError, match="is aborted"):
        transaction.commit(8)


def test_a_transaction_reads_only_what_it_wrote(open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    with store.begin() as transaction:
        transaction.write("block3", Plane.PARAM, bytes(100), offset=50)
        with pytest.raises(StoreError, match=r"block3/param: bytes 40 to 60 were not all written"):
            transaction.read("block3", Plane.PARAM, bytearray(20), offset=40)
        buffer = bytearray(b"x" * 100)
        transaction.read("block3", Plane.PARAM, buffer, offset=50).wait()
        assert buffer == bytes(100)
        with pytest.raises(StoreError, match="generation 2 is still open"):
            store.begin()


def test_frozen_planes_are_written_once(open_store: Open) -> None:
    shards = (*SHARDS, FROZEN)
    store = open_store(shards=shards)
    state = random_state(shards)
    with store.begin() as transaction:
        transaction.write("embedding", Plane.PARAM, os.urandom(6666))  # dropped: not committed
    with pytest.raises(StoreError, match="frozen and was not written yet"):
        store.read("embedding", Plane.PARAM, bytearray(6666))
    write_all(store, state, 1)
    written = sum(wear.written for wear in store.wear())
    with store.begin() as transaction:
        with pytest.raises(StoreError, match="embedding is frozen and was written already"):
            transaction.write("embedding", Plane.PARAM, bytes(6666))
        transaction.copy_rest()
        transaction.commit(2)
    assert sum(wear.written for wear in store.wear()) - written < written - 6666
    store.close()
    store = open_store(shards=shards)
    assert read_all(store) == state
    store.begin(replace_frozen=True).abort()
    assert read_all(store) == state
    state = random_state(shards)
    with store.begin(replace_frozen=True) as transaction:
        for (shard, plane), data in state.items():
            transaction.write(shard, plane, data)
        transaction.commit(3)
    assert read_all(store) == state
    store.close()
    assert read_all(open_store(shards=shards)) == state


@pytest.mark.parametrize(
    ("shard", "plane", "nbytes", "offset", "error", "said"),
    [
        ("nobody", Plane.PARAM, 1, 0, KeyError, "no such shard"),
        ("block1", Plane.GRAD, 1, 0, KeyError, "it has: param, exp_avg"),
        ("block1", Plane.PARAM, 2001, 0, ValueError, "0 to 2,001 asked for, the plane has 2,000"),
        ("block1", Plane.PARAM, 1, 2000, ValueError, "the plane has 2,000"),
        ("block1", Plane.PARAM, 1, -1, ValueError, "the plane has 2,000"),
    ],
)
def test_what_does_not_exist_is_refused(
    open_store: Open, shard: str, plane: Plane, nbytes: int, offset: int, error: type[Exception], said: str
) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    with pytest.raises(error, match=said):
        store.read(shard, plane, bytearray(nbytes), offset=offset)
    with store.begin() as transaction, pytest.raises(error, match=said):
        transaction.write(shard, plane, bytearray(nbytes), offset=offset)
    with pytest.raises(TypeError, match="read-only"):
        store.read("block1", Plane.PARAM, bytes(10))


def test_other_shards_or_another_job_are_refused(open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    store.close()
    other = (SHARDS[0], ShardSpec(name="block1", numel=1001, planes=SHARDS[1].planes), *SHARDS[2:])
    with pytest.raises(LayoutError, match=r"shard 1 is 'block1' \(1,000 elements.*wanted 'block1' \(1,001"):
        open_store(shards=other)
    assert open_store().current is not None


def test_a_cut_in_place_update_is_said(open_store: Open) -> None:
    store = open_store(generations=1)
    write_all(store, random_state(), 0)
    transaction = store.begin()
    transaction.write("block0", Plane.PARAM, b"ab")
    transaction.abort()
    with pytest.raises(StoreError, match=r"in-place update was cut.*checkpoint"):
        store.read("block0", Plane.PARAM, bytearray(2))
    store.close()
    with pytest.raises(StoreError, match=r"in-place update of generation 2 was cut.*resume=False.*discard_torn"):
        open_store(generations=1)
    again = open_store(generations=1, discard_torn=True)
    assert again.current is None
    state = random_state()
    write_all(again, state, 3)
    assert read_all(again) == state


def test_an_in_place_update_that_wrote_nothing_is_no_loss(open_store: Open) -> None:
    store = open_store(generations=1)
    state = random_state()
    write_all(store, state, 0)
    store.begin().abort()
    assert read_all(store) == state


def test_the_number_of_generations_may_change(tmp_path: Path, open_store: Open) -> None:
    state: State = {}
    for number, step in zip([2, 3, 1, 2, 1, 3], range(6), strict=True):
        store = open_store(generations=number)
        if state:
            assert read_all(store) == state
        for _ in range(2):
            state = random_state()
            write_all(store, state, step)
        files = [name for name in os.listdir(rank_folder(tmp_path)) if name.startswith("gen-")]
        assert len(files) == number
        store.close()


def test_generation_files_are_rewritten_in_place(tmp_path: Path, open_store: Open) -> None:
    store = open_store()
    write_all(store, random_state(), 0)
    before = {entry.name: entry.inode() for entry in os.scandir(rank_folder(tmp_path))}
    for step in range(1, 5):
        write_all(store, random_state(), step)
    after = {entry.name: entry.inode() for entry in os.scandir(rank_folder(tmp_path))}
    before.pop("manifest.json")
    after.pop("manifest.json")
    assert before == after
    assert sorted(before) == ["gen-0.bin", "gen-1.bin", "lock"]


def test_threads_may_write_one_transaction(open_store: Open) -> None:
    shards = tuple(ShardSpec(name=f"s{i}", numel=30_000 + i, planes=SHARDS[0].planes) for i in range(8))
    store = open_store(shards=shards, verify="always")
    state = random_state(shards)
    with store.begin() as transaction:

        def work(shard: str) -> None:
            for (name, plane), data in state.items():
                if name == shard:
                    for start in range(0, len(data), 5000):
                        transaction.write(name, plane, data[start : start + 5000], offset=start).wait()

        threads = [threading.Thread(target=work, args=(shard.name,)) for shard in shards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        transaction.commit(1)
    assert read_all(store) == state


def test_the_handle_keeps_the_buffer(open_store: Open) -> None:
    """A buffer that the caller drops at once is still written."""
    store = open_store()
    with store.begin() as transaction:
        for shard in SHARDS:
            for spec in shard.planes:
                transaction.write(shard.name, spec.plane, bytes([7]) * (shard.numel * spec.itemsize))
        transaction.commit(0)
    assert set().union(*read_all(store).values()) == {7}


def test_wear_counts_what_was_written(open_store: Open) -> None:
    store = open_store()
    state = random_state()
    payload = sum(map(len, state.values()))
    chunks = sum(-(-len(data) // CHUNK) for data in state.values())
    for step in range(3):
        write_all(store, state, step)
        (wear,) = store.wear()
        assert wear.step_written == payload + 4 * chunks
        assert wear.written == (step + 1) * wear.step_written
    assert os.stat(wear.path).st_dev == os.makedev(*map(int, wear.device.split(":")))

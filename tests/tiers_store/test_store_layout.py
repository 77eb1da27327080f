"""Offsets, stripes and checksum arithmetic against plain models."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers.errors import LayoutError, SpaceError
from lamina.tiers.memory.freelist import FreeList
from lamina.tiers.nvme.checksum import combine
from lamina.tiers.nvme.layout import ALIGN, Layout, require_same_shards, shard_from_json, shard_to_json
from lamina.tiers.nvme.room import plan_counts
from lamina.tiers.nvme.striping import deal, fit_weights, stripe_counts
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

PLANES = (
    PlaneSpec(plane=Plane.PARAM, itemsize=2),
    PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
    PlaneSpec(plane=Plane.EXP_AVG_SQ, itemsize=4),
)
CHUNK = 4096

shard_lists = st.lists(st.integers(0, 20_000), min_size=1, max_size=6).map(
    lambda sizes: [ShardSpec(name=f"s{i}", numel=n, planes=PLANES) for i, n in enumerate(sizes)]
)
count_lists = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_equals_the_checksum_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(slow_crc32c(first), slow_crc32c(second), len(second)) == slow_crc32c(first + second)


def test_slow_crc_is_crc32c() -> None:
    assert slow_crc32c(b"123456789") == 0xE3069283


@given(shard_lists, count_lists, st.data())
def test_segments_agree_with_dealing_byte_by_byte(
    shards: list[ShardSpec], counts: list[int], data: st.DataObject
) -> None:
    """The model deals chunk after chunk with a list per stripe; every byte has one place that no other has."""
    layout = Layout(shards, counts=counts, chunk_bytes=CHUNK)
    ends = [0] * len(counts)
    index = 0
    places: dict[tuple[str, Plane], list[tuple[int, int, int]]] = {}
    for shard in shards:
        for spec in shard.planes:
            nbytes = shard.numel * spec.itemsize
            chunks = []
            for start in range(0, nbytes, CHUNK):
                stripe = layout.pattern[index % len(layout.pattern)]
                size = min(CHUNK, nbytes - start)
                chunks.append((stripe, ends[stripe], size))
                ends[stripe] += size
                index += 1
            ends = [-(-end // ALIGN) * ALIGN for end in ends]
            places[shard.name, spec.plane] = chunks
    assert list(layout.sums_offsets) == ends
    assert layout.num_chunks == index
    key = data.draw(st.sampled_from(sorted(places)))
    extent = layout.extent(*key)
    offset = data.draw(st.integers(0, extent.nbytes))
    nbytes = data.draw(st.integers(0, extent.nbytes - offset))
    segments = layout.segments(extent, offset, nbytes)
    expected: list[tuple[int, int]] = []
    for number, (stripe, at, size) in enumerate(places[key]):
        lo, hi = max(offset, number * CHUNK), min(offset + nbytes, number * CHUNK + size)
        expected += [(stripe, at + byte - number * CHUNK) for byte in range(lo, hi, 512)]
    found: list[tuple[int, int]] = []
    at = 0
    for segment in segments:
        assert segment.buffer_offset == at
        at += segment.nbytes
    assert at == nbytes
    for number, (_stripe, _, size) in enumerate(places[key]):
        lo, hi = max(offset, number * CHUNK), min(offset + nbytes, number * CHUNK + size)
        for byte in range(lo, hi, 512):
            inside = byte - offset
            piece = next(s for s in segments if s.buffer_offset <= inside < s.buffer_offset + s.nbytes)
            found.append((piece.stripe, piece.file_offset + inside - piece.buffer_offset))
    assert found == expected


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_stripes_are_in_proportion(weights: list[float]) -> None:
    counts = stripe_counts(weights)
    total = sum(counts)
    for count, weight in zip(counts, weights, strict=True):
        share = weight / math.fsum(weights)
        assert abs(count / total - share) <= max(1 / 128, len(weights) / 256)
        assert count > 0


@given(count_lists)
def test_dealing_is_even(counts: list[int]) -> None:
    pattern = deal(counts)
    assert [pattern.count(i) for i in range(len(counts))] == list(counts)
    for end in range(1, len(pattern) + 1):
        for stripe, count in enumerate(counts):
            assert abs(pattern[:end].count(stripe) - count * end / len(pattern)) <= len(counts)


def test_a_path_that_is_nearly_full_gets_less() -> None:
    assert fit_weights(100, [1, 1], [10, 1000], ["a", "b"], "job") == (10, 90)
    assert fit_weights(100, [3, 1], [1000, 1000], ["a", "b"], "job") == (75, 25)


def test_no_room_shows_the_sum() -> None:
    with pytest.raises(SpaceError, match=r"needs 100 bytes.*room for 30.*a: 10 bytes; b: 20 bytes.*70 bytes are"):
        fit_weights(100, [1, 1], [10, 20], ["a", "b"], "job")


@given(shard_lists, st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.data())
def test_planned_counts_fit_every_path(shards: list[ShardSpec], weights: list[float], data: st.DataObject) -> None:
    need = Layout(shards, chunk_bytes=CHUNK).file_bytes[0]
    rooms = [data.draw(st.integers(0, 2 * need + 4096)) for _ in weights]
    names = [f"p{i}" for i in range(len(weights))]
    try:
        counts = plan_counts([(shards, 2)], weights=weights, rooms=rooms, names=names, chunk_bytes=CHUNK, what="job")
    except SpaceError:
        assert min(rooms) < 2 * need
        return
    sizes = Layout(shards, counts=counts, chunk_bytes=CHUNK).file_bytes
    assert all(2 * size <= room for size, room in zip(sizes, rooms, strict=True))


def test_padding_is_small_for_large_planes() -> None:
    shards = [ShardSpec(name=f"block{i}", numel=1_000_003, planes=PLANES) for i in range(8)]
    layout = Layout(shards)
    assert layout.file_bytes[0] <= layout.payload_bytes * 1.001


def test_other_shards_are_named() -> None:
    shards = [ShardSpec(name="a", numel=4, planes=PLANES), ShardSpec(name="b", numel=5, planes=PLANES)]
    other = [shards[0], ShardSpec(name="b", numel=6, planes=PLANES)]
    with pytest.raises(LayoutError, match=r"shard 1 is 'b' \(6 elements.*wanted 'b' \(5 elements"):
        require_same_shards(shards, other, "/x")
    with pytest.raises(
        LayoutError, match=r"holds 1 shards, wanted 2\. The state is kept: .*budgets.*remove the folder only"
    ):
        require_same_shards(shards, shards[:1], "/x")


@given(shard_lists)
def test_shards_survive_json(shards: list[ShardSpec]) -> None:
    assert [shard_from_json(shard_to_json(shard)) for shard in shards] == shards


@pytest.mark.parametrize(
    "data",
    [
        {"name": 3, "numel": 1, "frozen": False, "planes": []},
        {"name": "a", "numel": True, "frozen": False, "planes": []},
        {"name": "a", "numel": 1, "frozen": 0, "planes": []},
        {"name": "a", "numel": 1, "frozen": False, "planes": [["nonsense", 4]]},
        {"name": "a\nb", "numel": 1, "frozen": False, "planes": []},
    ],
)
def test_a_shard_of_the_wrong_type_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        shard_from_json(data)


def test_nonsense_paths_and_planes_are_refused() -> None:
    with pytest.raises(ValueError, match="path is empty"):
        NvmePath(path="")
    with pytest.raises(ValueError, match="weight is 0"):
        NvmePath(path="/x", weight=0)
    with pytest.raises(ValueError, match="bytes is 0"):
        NvmePath(path="/x", bytes=0)
    with pytest.raises(ValueError, match="listed twice"):
        ShardSpec(name="a", numel=1, planes=(PLANES[0], PLANES[0]))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.sampled_from([1, 8, 64])), max_size=60))
def test_free_list_agrees_with_a_bitmap(moves: list[tuple[bool, int, int]]) -> None:
    size, base = 1000, 24
    used = [False] * size
    holes = FreeList(size)
    live: list[tuple[int, int]] = []
    for give, nbytes, align in moves:
        if give and live:
            offset, length = live.pop(nbytes % len(live))
            holes.give(offset, length)
            used[offset : offset + length] = [False] * length
        else:
            taken = holes.take(nbytes, align, base)
            fits = any((base + at) % align == 0 and not any(used[at : at + nbytes]) for at in range(size - nbytes + 1))
            assert (taken is not None) == fits
            if taken is not None:
                assert (base + taken) % align == 0
                assert not any(used[taken : taken + nbytes])
                used[taken : taken + nbytes] = [True] * nbytes
                live.append((taken, nbytes))
        runs = "".join("x" if bit else "." for bit in used).split("x")
        assert [length for _, length in holes] == [len(run) for run in runs if run]
        assert holes.free_bytes == used.count(False)
        assert holes.largest == max((len(run) for run in runs), default=0)

"""Bytes arrive: any size, any offset, any alignment, on both backends, against a plain bytearray."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.aio_native import AlignedBuffer, AsyncIO, File, Priority, Read, ShortIOError, Write

ELEMENTS = [1, 3, 127, 255, 513, 4095, 4097, 1_048_577]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shift", [0, 1, 511, 512])
def test_every_size_comes_back_bit_exact(io: AsyncIO, path: Path, itemsize: int, shift: int) -> None:
    # sizes that are no multiple of a block, in memory that starts anywhere.
    for elements in ELEMENTS:
        nbytes = elements * itemsize
        data = pattern(nbytes)
        with io.open(path, create=True, size=0) as file, AlignedBuffer(nbytes + shift) as memory:
            memory.view[shift:] = data
            assert io.write(file, memory.view[shift:]).wait() == nbytes
            assert path.read_bytes() == data
            memory.view[shift:] = bytes(nbytes)
            assert io.read(file, memory.view[shift:]).wait() == nbytes
            assert bytes(memory.view[shift:]) == data


def test_random_pieces_match_a_bytearray(io: AsyncIO, path: Path) -> None:
    size = 3_000_001
    model, rng = bytearray(size), random.Random(3)
    with io.open(path, create=True, size=size) as file:
        for _ in range(200):
            offset = rng.randrange(size)
            nbytes = min(rng.choice([1, 100, 511, 512, 513, 4096, 5000, 70_000, 2_000_000]), size - offset)
            data = rng.randbytes(nbytes)
            assert io.write(file, data, offset).wait() == nbytes
            model[offset : offset + nbytes] = data
            back = bytearray(nbytes + 3)
            offset = rng.randrange(size - nbytes + 1)
            assert io.read(file, memoryview(back)[3:], offset).wait() == nbytes
            assert back[3:] == model[offset : offset + nbytes]
        assert file.size == size
    assert path.read_bytes() == model


def test_neighbours_in_one_block_survive_writes_side_by_side(io: AsyncIO, path: Path) -> None:
    # All of them rewrite parts of the same few blocks; each must leave the others' bytes alone.
    data = pattern(20_000)
    with io.open(path, create=True, size=20_000) as file:
        cuts = sorted({0, 20_000, *random.Random(5).sample(range(20_000), 300)})
        spans = list(itertools.pairwise(cuts))
        random.Random(6).shuffle(spans)
        handles = [io.write(file, data[a:b], a) for a, b in spans]
        assert sum(handle.wait() for handle in handles) == 20_000
    assert path.read_bytes() == data


def test_reading_past_the_end_is_one_short_error(io: AsyncIO, path: Path) -> None:
    path.write_bytes(pattern(10_000))
    with io.open(path) as file:
        for nbytes, offset in [(10_001, 0), (5_000_000, 0), (1, 10_000), (4096, 8192), (100, 1 << 40)]:
            handle = io.read(file, bytearray(nbytes), offset)
            with pytest.raises(ShortIOError) as caught:
                handle.wait()
            assert (caught.value.wanted, caught.value.offset) == (nbytes, offset)
            assert caught.value.got == max(0, 10_000 - offset)
            assert str(path) in str(caught.value)
            assert handle.wait() == max(0, 10_000 - offset)  # raised once; the bytes before the end did arrive
            assert handle.error is caught.value
        assert io.read(file, bytearray(10_000)).wait() == 10_000


def test_a_vectored_transfer_spans_files_and_directions(io: AsyncIO, tmp_path: Path) -> None:
    data = [pattern(100_000 + i, i) for i in range(8)]
    files: list[File] = [io.open(tmp_path / f"{i}.bin", create=True) for i in range(8)]
    handle = io.submit([Write(f, d) for f, d in zip(files, data, strict=True)], priority=Priority.PREFETCH)
    assert handle.wait() == handle.nbytes == sum(map(len, data))
    back = [bytearray(len(d)) for d in data]
    assert io.submit([Read(f, b) for f, b in zip(files, back, strict=True)]).wait() == handle.nbytes
    assert back == data
    assert io.submit([]).wait() == 0


def test_registered_and_plain_memory_give_the_same_bytes(make_io: Callable[..., AsyncIO], path: Path) -> None:
    path.write_bytes(pattern(5_000_000))
    seen = []
    for registered in (True, False):
        io = make_io(registered=registered)
        with AlignedBuffer(5_000_000) as buffer, io.open(path) as file:
            assert io.register(buffer.view) is (registered and io.backend == "uring")
            io.read(file, buffer.view).wait()
            seen.append(bytes(buffer.view))
            io.unregister(buffer.view)
    assert seen[0] == seen[1] == path.read_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 65_536, 1_000_001])
def test_the_calls_that_wait_at_once_do_the_same(io: AsyncIO, path: Path, nbytes: int) -> None:
    path.write_bytes(pattern(1_100_000))
    model = bytearray(path.read_bytes())
    with io.open(path, writable=True) as file:
        for offset in (0, 512, 4095):
            data, back = pattern(nbytes, offset + 1), bytearray(nbytes)
            assert io.write_now(file, data, offset) == nbytes
            model[offset : offset + nbytes] = data
            assert io.read_now(file, back, offset) == nbytes
            assert back == data
        with pytest.raises(ShortIOError) as caught:
            io.read_now(file, bytearray(5000), 1_099_000)
        assert caught.value.got == 1000
    assert path.read_bytes() == model

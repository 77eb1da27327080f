"""crc32c against the published check value, known vectors and the byte-by-byte reference."""

import random
import threading

import pytest

from lamina.aio_native import AlignedBuffer, crc32c, crc32c_path
from lamina.aio_native.native import load_threads


def plain(data: bytes, value: int = 0) -> int:
    """Bit by bit, as the definition has it."""
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data: bytes, value: int) -> None:
    assert crc32c(data) == value == plain(data)


def test_the_fast_path_equals_the_reference_at_every_length_and_start() -> None:
    rng, native = random.Random(1), load_threads()
    data = rng.randbytes(60_000)
    lengths = [*range(70), *(rng.randrange(60_000) for _ in range(60)), 6143, 6144, 6145, 12_288, 59_000]
    for nbytes in lengths:
        start = rng.randrange(0, min(9, 60_001 - nbytes))
        part = memoryview(data)[start : start + nbytes]
        value = rng.randrange(1 << 32)
        expected = native.lib.lamina_crc32c_plain(value, native.ffi.from_buffer(part), nbytes)
        assert crc32c(part, value) == expected, (nbytes, start)
    assert crc32c(data[:2000]) == plain(data[:2000])


def test_parts_add_up_to_the_whole() -> None:
    data = random.Random(2).randbytes(100_000)
    assert crc32c(data[33_333:], crc32c(data[:33_333])) == crc32c(data)


def test_a_flipped_bit_shows() -> None:
    data = bytearray(random.Random(3).randbytes(20_000))
    before = crc32c(data)
    for bit in (0, 77_777, 159_999):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != before
        data[bit // 8] ^= 1 << bit % 8


def test_the_gil_is_free_meanwhile() -> None:
    """Were the GIL held, this thread would hardly get a turn before the other is done; on a core that both share it may get none
    once, but not over and over."""

    def turns_meanwhile() -> int:
        begun, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (begun.set(), crc32c(buffer.view), done.set()))
        turns = 0
        thread.start()
        begun.wait()
        while not done.is_set():
            turns += 1
        thread.join()
        return turns

    with AlignedBuffer(256 << 20) as buffer:
        assert any(turns_meanwhile() > 1000 for _ in range(50))


def test_wrong_values_are_refused() -> None:
    assert crc32c_path() in ("sse4.2+pclmul", "armv8-crc", "table")
    with pytest.raises(ValueError, match="32-bit"):
        crc32c(b"x", 1 << 32)
    with pytest.raises(TypeError):
        crc32c("text")

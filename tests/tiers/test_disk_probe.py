"""The probe's figures against a file written and read by hand, and what it leaves behind."""

import time
from pathlib import Path

import pytest

from lamina.aio_native import AlignedBuffer, AsyncIO
from lamina.tiers import DiskSpeed, probe_disk


@pytest.mark.parametrize("nbytes", [1 << 20, (20 << 20) + 4096])
def test_the_probe_moves_what_it_says_and_leaves_nothing(nbytes: int, tmp_path: Path) -> None:
    with AsyncIO() as io:
        before = io.stats()
        began = time.perf_counter()
        speed = probe_disk(io, tmp_path, nbytes)
        passed = time.perf_counter() - began
        after = io.stats()
    assert after.bytes_written - before.bytes_written == 4 * nbytes, "once to extend the file, three times to measure"
    assert after.bytes_read - before.bytes_read == 3 * nbytes
    assert nbytes / passed < min(speed.read, speed.write), "each round takes less than the whole probe"
    assert list(tmp_path.iterdir()) == []


def test_it_agrees_with_a_plain_read_of_the_same_size(tmp_path: Path) -> None:
    nbytes = 16 << 20
    with AsyncIO() as io, AlignedBuffer(nbytes) as buffer:
        speed = probe_disk(io, tmp_path, nbytes)
        file = io.open(tmp_path / "plain", writable=True, create=True, size=nbytes)
        io.write(file, buffer.view).wait()
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            io.read(file, buffer.view).wait()
            taken.append(time.perf_counter() - began)
        file.close()
    assert 0.1 < speed.read / (nbytes / sorted(taken)[2]) < 10, "of the same order, on a machine with other work"


def test_times_of_both_directions_add_up() -> None:
    assert DiskSpeed(read=2.0, write=4.0, direct=True).seconds(4, 4) == pytest.approx(3.0)

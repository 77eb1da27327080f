"""The probe's figures against a file written and read by hand, and what it leaves behind."""

import time
from pathlib import Path

import pytest
from throttled_io import HandClock, ThrottledIO

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


def test_it_agrees_with_plain_transfers_of_the_same_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes by the bytes: what a machine with other work makes of its disk is not the probe's doing."""
    nbytes, clock = 16 << 20, HandClock()
    for module in ("throttled_io", "lamina.tiers.probe"):
        monkeypatch.setattr(f"{module}.time", clock)
    with ThrottledIO(AsyncIO(), read_rate=200e6, write_rate=400e6) as io, AlignedBuffer(nbytes) as buffer:
        speed = probe_disk(io, tmp_path, nbytes)  # type: ignore[arg-type]
        file = io.open(tmp_path / "plain", writable=True, create=True, size=nbytes)
        for rate, start in ((speed.write, io.write), (speed.read, io.read)):
            began = clock.now
            start(file, buffer.view).wait()
            assert rate == pytest.approx(nbytes / (clock.now - began))
        file.close()
    assert (speed.read, speed.write) == pytest.approx((200e6, 400e6))


def test_times_of_both_directions_add_up() -> None:
    assert DiskSpeed(read=2.0, write=4.0, direct=True).seconds(4, 4) == pytest.approx(3.0)

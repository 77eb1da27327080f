"""The probe's figures against a file written and read by hand, and what it leaves behind."""

import time
from pathlib import Path

import pytest
from throttled_io import HandClock, ThrottledIO

from lamina.aio_native import AlignedBuffer, AsyncIO
from lamina.tiers import DiskSpeed, probe_disk, probe_mix


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
    for module in ("throttled_io", "lamina.tiers.links.probe"):
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


@pytest.mark.parametrize(("read_bytes", "written_bytes"), [(3 << 20, 5 << 20), (2 << 20, 0), (0, 2 << 20), (1, 1)])
def test_a_mix_moves_each_direction_s_bytes_twice_a_round(read_bytes: int, written_bytes: int, tmp_path: Path) -> None:
    moved_read, moved_written = (-(-nbytes // (1 << 20)) << 20 for nbytes in (read_bytes, written_bytes))
    with AsyncIO() as io:
        began = time.perf_counter()
        seconds = probe_mix(io, tmp_path, read_bytes=read_bytes, written_bytes=written_bytes, rounds=4)
        passed = time.perf_counter() - began
        stats = io.stats()
    assert len(seconds) == 4
    assert stats.bytes_read == 8 * moved_read
    assert stats.bytes_written == 8 * moved_written + moved_read + moved_written, "once to fill the file"
    assert 0 < 2 * sum(seconds) <= passed, "the quicker of two ways counts"
    assert list(tmp_path.iterdir()) == []


def test_of_a_large_mix_a_part_is_moved_in_the_same_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.tiers.links.probe.MIX_BYTES", 8 << 20)
    with AsyncIO() as io:
        began = time.perf_counter()
        (seconds,) = probe_mix(io, tmp_path, read_bytes=300 << 20, written_bytes=100 << 20, rounds=1)
        passed = time.perf_counter() - began
        stats = io.stats()
    assert (stats.bytes_read, stats.bytes_written) == (2 * 6 << 20, (2 * 2 << 20) + (8 << 20))
    assert seconds * 8 / 400 < passed, "scaled to all of the bytes"


@pytest.mark.parametrize(("read_bytes", "written_bytes"), [(0, 0), (-1, 5)])
def test_nothing_to_move_is_refused(read_bytes: int, written_bytes: int, tmp_path: Path) -> None:
    with AsyncIO() as io, pytest.raises(ValueError, match="at least one byte"):
        probe_mix(io, tmp_path, read_bytes=read_bytes, written_bytes=written_bytes)

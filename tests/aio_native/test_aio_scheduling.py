"""Order and limits: priorities, bytes in flight, cancel, close, sync, counters."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.aio_native import (
    AlignedBuffer,
    AsyncIO,
    CancelledIOError,
    ClosedIOError,
    Handle,
    Priority,
    Read,
    Write,
)

MIB = 1 << 20
MakeIO = Callable[..., AsyncIO]


def under_way(start: Callable[[], Handle]) -> Handle:
    """A transfer that has not ended when this returns; one that was faster than this thread is waited for and started again."""
    while (handle := start()).done():
        handle.wait()
    return handle


def test_urgent_transfers_overtake_prefetches_and_write_backs(make_io: MakeIO, path: Path) -> None:
    """Told by what each finds at the file's end, which the write-back comes to last."""
    io = make_io(queue_depth=1, block_bytes=MIB, inline_bytes=0)
    size = 128 * MIB
    with AlignedBuffer(size) as new, AlignedBuffer(32 * MIB) as found, io.open(path, create=True, size=size) as file:
        old = bytearray(4096)
        while True:  # until none of them was over before the last one was asked for
            new.view[:] = bytes(size)
            io.write(file, new.view).wait()
            new.view[:] = b"\x01" * size
            write_back = io.write(file, new.view)
            prefetch = io.read(file, found.view, size - 32 * MIB, priority=Priority.PREFETCH)
            demand = io.read(file, old, size - 4096)
            urgent_write = io.write(file, b"\x02" * 4096, size - 4096, priority=Priority.DEMAND)
            in_time = not write_back.done() and not prefetch.done()
            io.drain()
            if in_time:
                break
        assert old == bytes(4096), "before the write-back"
        assert found.view[-4096:] == b"\x02" * 4096, "the urgent write came before the prefetch"
        assert not any(found.view[:-4096]), "and that before the write-back"
        last = bytearray(4096)
        io.read(file, last, size - 4096).wait()
        assert last == b"\x01" * 4096
        for handle in (write_back, prefetch, demand, urgent_write):
            handle.wait()


def test_bytes_in_flight_stay_below_the_limit(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=16, block_bytes=256 << 10, max_inflight_bytes=MIB)
    with AlignedBuffer(32 * MIB) as buffer, io.open(path, create=True, size=32 * MIB) as file:
        io.submit([Write(file, buffer.view[i : i + 3 * MIB], i) for i in range(0, 30 * MIB, 3 * MIB)]).wait()
        io.read(file, buffer.view).wait()
        (device,) = io.stats().devices
        assert 0 < device.max_inflight_bytes <= MIB
        assert device.max_inflight <= 16
        assert (device.inflight, device.inflight_bytes) == (0, 0)


def test_cancel_drops_what_has_not_started(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=1, block_bytes=MIB)
    with AlignedBuffer(128 * MIB) as buffer, io.open(path, create=True, size=128 * MIB) as file:
        while True:
            first = io.write(file, buffer.view)
            second = io.write(file, buffer.view[:MIB])
            if second.cancel():
                break
            assert first.done(), "only then may the second have started"
            io.drain()
        with pytest.raises(CancelledIOError) as caught:
            second.wait()
        assert (caught.value.errno, caught.value.got) == (errno.ECANCELED, 0)
        assert first.cancel()
        with pytest.raises(CancelledIOError) as caught:
            first.wait()
        assert caught.value.got is not None
        assert caught.value.got < 128 * MIB
        assert caught.value.got % MIB == 0
        assert not first.cancel()
        assert io.write(file, buffer.view[:MIB]).wait() == MIB  # nothing is stuck


def test_close_waits_or_cancels_as_asked(backend: str, tmp_path: Path) -> None:
    with AlignedBuffer(64 * MIB) as buffer:
        buffer.view[:] = b"\x05" * (64 * MIB)
        for cancel in (False, True):
            path = tmp_path / f"{cancel}.bin"
            io = AsyncIO(backend=backend, queue_depth=2)  # type: ignore[arg-type]
            file = io.open(path, create=True, size=64 * MIB)
            handle = under_way(lambda io=io, file=file: io.write(file, buffer.view))  # type: ignore[misc]
            io.close(cancel=cancel)
            assert handle.done()
            if cancel:
                with pytest.raises(CancelledIOError):
                    handle.wait()
            else:
                assert handle.wait() == 64 * MIB
                assert path.read_bytes() == bytes(buffer.view)
            io.close()
            with pytest.raises(ClosedIOError):
                io.read(file, bytearray(1))
            assert io.stats().bytes_written >= (0 if cancel else 64 * MIB)


def test_closing_a_file_waits_for_its_transfers(io: AsyncIO, path: Path) -> None:
    with AlignedBuffer(32 * MIB) as buffer:
        file = io.open(path, create=True, size=32 * MIB)
        handle = io.write(file, buffer.view)
        file.close()
        assert handle.done()
        assert handle.wait() == 32 * MIB


def test_fsync_comes_after_the_writes_before_it(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=4)
    with AlignedBuffer(32 * MIB) as buffer, io.open(path, create=True, size=32 * MIB) as file:
        writes = [io.write(file, buffer.view[i : i + MIB], i) for i in range(0, 32 * MIB, MIB)]
        assert io.fsync(file).wait() == 0
        assert all(write.done() for write in writes)
        assert io.fsync(file, data_only=False).wait() == 0
        assert io.stats().devices[0].sync.operations == 2


def test_a_handle_answers_at_once_when_nothing_is_pending(io: AsyncIO, path: Path) -> None:
    with io.open(path, create=True, size=4096) as file:
        handle = io.read(file, bytearray(0))
        assert handle.done()
        assert handle.wait(0) == handle.wait() == 0
        io.drain()


def test_a_timeout_leaves_the_transfer_going(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=1)
    with AlignedBuffer(128 * MIB) as buffer, io.open(path, create=True, size=128 * MIB) as file:
        told = ""
        while not told:  # until it was not over before the timeout
            handle = io.write(file, buffer.view)
            try:
                handle.wait(0.001)
            except TimeoutError as error:
                told = str(error)
        assert "write of" in told
        assert handle.wait(100.0) == 128 * MIB
        with pytest.raises(ValueError, match="nan"):
            io.write(file, buffer.view).wait(float("nan"))
        io.drain()


def test_dropped_handles_still_finish(io: AsyncIO, path: Path) -> None:
    with io.open(path, create=True, size=8 * MIB) as file:
        for i in range(200):
            io.write(file, bytes([i]) * 40_000, i * 40_000)  # neither handle nor memory is kept here
        io.drain()
        back = bytearray(200 * 40_000)
        io.read(file, back).wait()
    assert back == b"".join(bytes([i]) * 40_000 for i in range(200))


def test_counters_add_up(io: AsyncIO, path: Path) -> None:
    with AlignedBuffer(4 * MIB) as buffer, io.open(path, create=True, size=4 * MIB) as file:
        io.write(file, buffer.view).wait()
        io.submit([Read(file, buffer.view[: 2 * MIB])]).wait()
        io.read(file, bytearray(100), 5).wait()
        time.sleep(0.05)
        stats = io.stats()
        (device,) = stats.devices
        assert (stats.bytes_read, stats.bytes_written) == (2 * MIB + 100, 4 * MIB)
        assert device.device == path.stat().st_dev
        assert device.read.operations == sum(device.read.histogram) == 3
        assert device.write.operations == sum(device.write.histogram) == 4
        assert device.read.bounced_bytes == (100 if file.direct else 0)
        assert 0 < device.read.mean_latency_s <= device.read.max_latency_s
        assert device.idle_s >= 0.05
        assert 0 < device.busy_s <= device.read.busy_s + device.write.busy_s + 0.001
        for direction in (device.read, device.write):  # one after the other
            assert (direction.alone_bytes, direction.alone_s) == (direction.bytes, direction.busy_s)
        assert stats.as_dict()["backend"] == io.backend


def test_what_a_direction_does_alone_is_counted_apart(make_io: MakeIO, path: Path) -> None:
    io = make_io(inline_bytes=0, max_inflight_bytes=8 * MIB)
    size = 48 * MIB
    with AlignedBuffer(2 * size) as buffer, io.open(path, create=True, size=2 * size) as file:
        io.write(file, buffer.view).wait()
        before = io.stats().devices[0]
        io.submit(
            [
                request
                for at in range(0, size, MIB)
                for request in (
                    Write(file, buffer.view[at : at + MIB], at),
                    Read(file, buffer.view[size + at : size + at + MIB], size + at),
                )
            ]
        ).wait()
        device = io.stats().devices[0]
    assert device.read.bytes == size
    assert before.read.busy_s == 0
    assert before.write.alone_s == before.write.busy_s
    reads_s, writes_s = device.read.busy_s, device.write.busy_s - before.write.busy_s
    writes_alone_s = device.write.alone_s - before.write.alone_s
    mixed_s = reads_s - device.read.alone_s
    assert mixed_s > 0
    assert writes_s - writes_alone_s == pytest.approx(mixed_s)
    assert device.busy_s - before.busy_s == pytest.approx(device.read.alone_s + writes_alone_s + mixed_s)
    assert device.read.alone_bytes < size, "every piece was for a time beside one of the other direction"
    assert device.write.alone_bytes - before.write.alone_bytes < size


def test_many_threads_may_use_one(io: AsyncIO, path: Path) -> None:
    problems: list[str] = []
    with io.open(path, create=True, size=8 * 100_003) as file:

        def work(number: int) -> None:
            start = number * 100_003
            for turn in range(30):
                data = bytes([number * 30 + turn & 255]) * 100_003
                io.write(file, data, start).wait()
                back = bytearray(100_003)
                io.read(file, back, start).wait()
                if back != data:
                    problems.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []

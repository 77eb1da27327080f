"""Things that go wrong: one clear error each, and everything stays usable."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina.aio_native import (
    AlignedBuffer,
    AsyncIO,
    AsyncIOError,
    ForkedIOError,
    Read,
    ShortIOError,
    UnseenErrorWarning,
    Write,
)

MIB = 1 << 20
MakeIO = Callable[..., AsyncIO]


@pytest.fixture
def alarm_storm() -> Iterator[list[int]]:
    """SIGALRM every millisecond, handled in Python."""
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield rung
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_every_millisecond_do_no_harm(io: AsyncIO, path: Path, alarm_storm: list[int]) -> None:
    #
    with AlignedBuffer(64 * MIB) as buffer, io.open(path, create=True, size=64 * MIB) as file:
        pattern = os.urandom(MIB)
        for i in range(64):
            buffer.view[i * MIB : (i + 1) * MIB] = pattern
        rounds = 0
        while rounds < 4 or len(alarm_storm) <= 20:  # 256 MiB out and in, or more where that takes no time
            rounds += 1
            assert io.write(file, buffer.view).wait() == 64 * MIB
            buffer.view[:: MIB + 1] = bytes(64)
            assert io.read(file, buffer.view).wait(timeout=60) == 64 * MIB
        for i in range(64):
            assert buffer.view[i * MIB : (i + 1) * MIB] == pattern


def test_a_signal_handler_may_end_the_wait(make_io: MakeIO, path: Path) -> None:
    class Enough(Exception):
        pass

    def raise_enough(number: int, frame: object) -> None:
        raise Enough

    io = make_io(queue_depth=1)
    before = signal.signal(signal.SIGALRM, raise_enough)
    try:
        with AlignedBuffer(256 * MIB) as buffer, io.open(path, create=True, size=256 * MIB) as file:
            handle = io.write(file, buffer.view)
            with pytest.raises(Enough):  # noqa: PT012 - wherever this thread is by then
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                handle.wait()
                signal.pause()
            assert handle.wait() == 256 * MIB
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_file_cut_short_under_reads_gives_one_error(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=2, block_bytes=64 << 10)
    with AlignedBuffer(16 * MIB) as buffer, io.open(path, create=True, size=16 * MIB) as file:
        io.write(file, buffer.view).wait()
        handle = io.read(file, buffer.view)
        os.truncate(path, MIB + 77)
        io.drain()
        if handle.error is None:  # it was faster than the truncation
            handle = io.read(file, buffer.view)
        with pytest.raises(ShortIOError) as caught:
            handle.wait()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.got is not None
        assert MIB + 77 <= caught.value.got < 16 * MIB
        assert io.read(file, buffer.view[: MIB + 77]).wait() == MIB + 77
        os.unlink(path)  # a vanished file stays usable while it is open
        assert io.read(file, buffer.view[:MIB]).wait() == MIB


def test_the_first_failed_request_of_a_transfer_is_told(io: AsyncIO, tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    whole.write_bytes(bytes(100_000))
    empty.write_bytes(b"")
    with io.open(whole) as good, io.open(empty) as bad:
        requests = [Read(good, bytearray(1000), 10), Read(bad, bytearray(50), 3), Read(bad, bytearray(60), 4)]
        with pytest.raises(ShortIOError) as caught:
            io.submit(requests).wait()
        error = caught.value
        assert (error.path, error.offset, error.wanted, error.got) == (str(empty), 3, 50, 0)


def test_a_file_size_limit_is_one_clear_error(backend: str, path: Path) -> None:
    code = f"""
import errno, resource
from lamina.aio_native import AlignedBuffer, AsyncIO, AsyncIOError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with AsyncIO(backend={backend!r}) as io, io.open({str(path)!r}, create=True) as file:
    for nbytes in (4 << 20, (4 << 20) + 5):
        try:
            io.write(file, bytes(nbytes)).wait()
        except AsyncIOError as error:
            print(error.errno == errno.EFBIG, error.wanted == nbytes, error.got)
    print(io.write(file, b"x" * 1000).wait())
    try:
        io.open({str(path)!r} + "2", create=True, size=4 << 20)
    except AsyncIOError as error:
        print(error.errno == errno.EFBIG)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "1048576"] * 2 + ["1000", "True"]


def test_too_little_lockable_memory_means_unregistered_with_one_warning(path: Path) -> None:
    code = f"""
import ctypes, os, resource, warnings
from lamina.aio_native import AlignedBuffer, AsyncIO, BufferedIOWarning
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.getuid() == 0:
    os.chown({str(path.parent)!r}, 65534, 65534)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    warnings.simplefilter("ignore", BufferedIOWarning)
    with AsyncIO(backend="uring") as io, AlignedBuffer(64 << 20) as buffer:
        print(io.register(buffer.view), io.register(buffer.view[: 32 << 20]))
        with io.open("data.bin", create=True, size=64 << 20) as file:
            buffer.view[-1] = 7
            io.write(file, buffer.view).wait()
            buffer.view[-1] = 0
            print(io.read(file, buffer.view).wait(), buffer.view[-1])
print(len(seen), seen[0].category.__name__, seen[0].message)
"""
    try:
        AsyncIO(backend="uring").close()
    except AsyncIOError as error:
        pytest.skip(str(error))
    # The directory is handed to the child open: pytest keeps the way to it closed to other users.
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["False False", f"{64 * MIB} 7"]
    assert lines[2].startswith("1 RegistrationWarning")
    for word in (str(64 * MIB), "RLIMIT_MEMLOCK is 1048576 bytes", "ulimit -l", "CAP_IPC_LOCK"):
        assert word in lines[2]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # from Python 3.12 on: what is tested
def test_a_forked_child_is_told_and_the_parent_goes_on(io: AsyncIO, path: Path) -> None:
    with io.open(path, create=True, size=MIB) as file:
        handle = io.write(file, bytes(MIB))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # no pytest in the child: it reports through the pipe
            told = []
            for attempt in (lambda: io.read(file, bytearray(1)), handle.wait, lambda: io.open(path), lambda: file.size):
                try:
                    found = attempt()
                    # The write may have ended before the fork: then its outcome is known here too.
                    told.append(str(attempt == handle.wait and found == MIB))
                except ForkedIOError as error:
                    told.append(str(error.errno == errno.EPERM and "fork" in str(error)))
            io.close()
            file.close()
            del handle
            gc.collect()
            os.write(writer, " ".join(told).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == "True True True True"
        assert os.waitpid(child, 0)[1] == 0
        assert handle.wait() == MIB
        assert io.read(file, bytearray(MIB)).wait() == MIB


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def rounds(io: AsyncIO, folder: Path, count: int) -> None:
    """Opens, moves and closes, every other round with a failure on the way."""
    good, short = folder / "good", folder / "short"
    good.write_bytes(bytes(8192))
    short.write_bytes(b"x")
    memory = bytearray(100)
    for number in range(count):
        with io.open(good if number % 2 else short, writable=number % 3 == 0) as file:
            handle = io.read(file, memory)
            if number % 2:
                handle.wait()
            else:
                with pytest.raises(ShortIOError):
                    handle.wait()
        with pytest.raises(AsyncIOError):
            io.open(folder / "missing" / "file", create=number % 2 == 0)
        with pytest.raises(AsyncIOError):
            io.open(folder, writable=number % 2 == 0)


def test_descriptors_do_not_leak(io: AsyncIO, tmp_path: Path) -> None:
    rounds(io, tmp_path, 10)
    before = descriptors()
    rounds(io, tmp_path, 300)
    assert descriptors() == before
    io.open(tmp_path / "good")  # dropped without close
    gc.collect()
    assert descriptors() == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_descriptors_do_not_leak_in_ten_thousand_rounds(io: AsyncIO, tmp_path: Path) -> None:
    before = descriptors()
    rounds(io, tmp_path, 10_000)
    assert descriptors() == before


def test_engines_leave_no_descriptor_and_no_thread(backend: str, tmp_path: Path) -> None:
    def once() -> None:
        with AsyncIO(backend=backend) as io, io.open(tmp_path / "f", create=True, size=MIB) as file:  # type: ignore[arg-type]
            io.write(file, bytes(MIB)).wait()

    once()
    before = descriptors(), threads()
    for _ in range(50):
        once()
    until = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
    while threads() > before[1] and time.monotonic() < until:
        time.sleep(0.001)
    assert (descriptors(), threads()) == before


def test_running_out_of_descriptors_is_an_error_and_heals(io: AsyncIO, path: Path) -> None:
    path.write_bytes(bytes(5000))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 5, hard))
    try:
        with pytest.raises(AsyncIOError) as caught:
            opened.extend(io.open(path, direct=False) for _ in range(50))
        assert caught.value.errno == errno.EMFILE
        for file in opened:
            file.close()
        with io.open(path, direct=False) as file:
            assert io.read(file, bytearray(5000)).wait() == 5000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_failure_that_nobody_waits_for_is_told(backend: str, path: Path) -> None:
    path.write_bytes(b"x")
    io = AsyncIO(backend=backend)  # type: ignore[arg-type]
    with io.open(path) as file:
        io.read(file, bytearray(10))
        while not io.stats().devices[0].read.errors:
            time.sleep(0.001)
    with pytest.warns(UnseenErrorWarning, match="nobody waited.*wanted 10 bytes, got 1"):
        io.close()


def test_memory_outlives_its_owner_while_it_is_read_into(make_io: MakeIO, path: Path) -> None:
    io = make_io(queue_depth=1)
    path.write_bytes(os.urandom(32 * MIB))
    with io.open(path) as file:
        buffer = AlignedBuffer(32 * MIB)
        view = buffer.view[:]
        handle = io.read(file, buffer.view)
        with pytest.raises(BufferError):
            buffer.view.release()
        buffer.close()
        del buffer
        gc.collect()
        handle.wait()
        assert view == path.read_bytes()


def test_waiting_in_two_threads_raises_once(io: AsyncIO, path: Path) -> None:
    path.write_bytes(b"x")
    raised: list[BaseException] = []
    with io.open(path) as file:
        handle = io.submit([Read(file, bytearray(100)) for _ in range(20)])

        def wait() -> None:
            try:
                handle.wait()
            except AsyncIOError as error:
                raised.append(error)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(raised) == 1
    assert handle.error is raised[0]


def test_a_failing_write_does_not_touch_other_requests(io: AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with io.open(path, create=True, size=MIB) as file:
        before = io.write(file, b"\x01" * MIB)
        with pytest.raises(ShortIOError):
            io.read(file, bytearray(10), 2 * MIB).wait()
        assert before.wait() == MIB
        assert io.submit([Write(file, b"\x02" * 100, 50)]).wait() == 100
    assert path.read_bytes() == b"\x01" * 50 + b"\x02" * 100 + b"\x01" * (MIB - 150)

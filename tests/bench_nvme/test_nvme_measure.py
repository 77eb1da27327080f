"""Carrying out trials: what is counted is what is moved, where, in which ratio and with which memory."""

import errno
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvme_toys import point

from lamina.aio_native import AsyncIO, BackendUnavailableError, File, Handle, IOStats
from lamina.bench.nvme import measure
from lamina.bench.nvme.measure import Bench, FileSet, create_files, fill_incompressible, num_threads
from lamina.bench.nvme.points import Point, Trial, Workload

K, M = 1 << 10, 1 << 20


def fine() -> None:
    """Nothing asks to stop."""


@pytest.fixture(params=["uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        AsyncIO(backend=request.param, queue_depth=2).close()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def bench(tmp_path: Path, backend: str) -> Iterator[Bench]:
    files = FileSet(paths=(tmp_path / "a", tmp_path / "b"), file_bytes=4 * M)
    with Bench(files, buffer_bytes=4 * M, read_share=0.25) as made:
        create_files(files, made.buffer.view, backend=backend, check=fine)
        yield made


def test_memory_is_filled_so_that_nothing_shrinks_it() -> None:
    memory = memoryview(bytearray(20 * M))
    fill_incompressible(memory)
    assert len(zlib.compress(memory[: 4 * M], 1)) > 4 * M
    pages = {bytes(memory[begin : begin + 4096]) for begin in range(0, len(memory), 4096)}
    assert len(pages) == len(memory) // 4096


def test_odd_sizes_are_filled_to_the_end() -> None:
    memory = memoryview(bytearray(8 * M + 4096 + 123))
    fill_incompressible(memory)
    assert any(memory[-100:])


def test_files_are_made_private_full_and_preallocated(tmp_path: Path, backend: str) -> None:
    files = FileSet(paths=(tmp_path / "a", tmp_path / "b"), file_bytes=3 * M)
    with Bench(files, buffer_bytes=2 * M) as made:
        created = create_files(files, made.buffer.view, backend=backend, check=fine)
    assert created.written_bytes == 6 * M
    assert created.first_write > 0
    for path in files.paths:
        status = path.stat()
        assert (status.st_size, status.st_mode & 0o777) == (3 * M, 0o600)
        assert status.st_blocks * 512 >= 3 * M
        content = path.read_bytes()
        assert len(zlib.compress(content, 1)) > 3 * M


def test_files_that_exist_are_never_written(tmp_path: Path, backend: str) -> None:
    precious = tmp_path / "a"
    precious.write_bytes(b"precious")
    files = FileSet(paths=(precious,), file_bytes=M)
    with Bench(files, buffer_bytes=M) as made, pytest.raises(OSError, match="EEXIST") as caught:
        create_files(files, made.buffer.view, backend=backend, check=fine)
    assert caught.value.errno == errno.EEXIST
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("at", [(64 * K, 1, 1), (64 * K, 8, 2), (M, 1, 1), (M, 2, 2)])
@pytest.mark.parametrize("workload", list(Workload))
def test_the_directions_are_those_of_the_workload(
    bench: Bench, backend: str, workload: Workload, at: tuple[int, int, int]
) -> None:
    trial = Trial(workload=workload, point=point(backend, *at), seconds=0.05)
    found = bench.run(trial)
    assert found.trial == trial
    assert (found.read > 0, found.write > 0) == (workload is not Workload.WRITE, workload is not Workload.READ)
    if workload is Workload.MIX:
        assert found.read / found.rate == pytest.approx(0.25, abs=0.12)
    assert found.latency_s > 0
    assert found.cost_s >= 0.05
    assert 0 < found.depth <= trial.point.queue_depth * 1.01


def test_the_rate_is_bytes_over_time(bench: Bench, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[IOStats] = []
    real = AsyncIO.stats

    def stats(io: AsyncIO) -> IOStats:
        readings.append(real(io))
        return readings[-1]

    monkeypatch.setattr(AsyncIO, "stats", stats)
    found = bench.run(Trial(workload=Workload.READ, point=point(backend, 256 * K, 4), seconds=0.2))
    moved = readings[-1].bytes_read - readings[0].bytes_read
    assert moved >= measure.QUEUES * M
    assert 0.9 * found.read <= moved / 0.2
    assert moved / found.read < found.cost_s


def least_left_over(made: Bench, at: Point, monkeypatch: pytest.MonkeyPatch) -> int:
    """The fewest bytes that the engine has been asked for beyond the request that is waited for; checks the engine's settings."""
    asked, left = 0, []
    read, wait = AsyncIO.read, Handle.wait

    def count_read(io: AsyncIO, file: File, buffer: memoryview, offset: int = 0) -> Handle:
        nonlocal asked
        assert (io.config.block_bytes, io.config.queue_depth) == (at.block_bytes, at.queue_depth)
        assert io.config.max_inflight_bytes == at.inflight_bytes
        asked += len(buffer)
        return read(io, file, buffer, offset)

    def count_wait(handle: Handle, timeout: float | None = None) -> int:
        nonlocal asked
        asked -= handle.nbytes
        left.append(asked)
        return wait(handle, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(AsyncIO, "read", count_read)
        patched.setattr(Handle, "wait", count_wait)
        made.run(Trial(workload=Workload.READ, point=at, seconds=0.1))
    return min(left[: -measure.REQUESTS])  # at the end they run out


@pytest.mark.parametrize("at", [(64 * K, 8), (512 * K, 4), (M, 1)])
def test_the_queue_is_kept_full(
    bench: Bench, backend: str, at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a request takes, and whatever else this machine does: the engine never has less than a queue's worth to do."""
    assert least_left_over(bench, point(backend, *at), monkeypatch) >= at[0] * at[1]


def test_much_in_flight_is_not_cut_down(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileSet(paths=(tmp_path / "a",), file_bytes=32 * M)
    with Bench(files, buffer_bytes=32 * M) as made:
        create_files(files, made.buffer.view, backend=backend, check=fine)
        assert least_left_over(made, point(backend, 2 * M, 8), monkeypatch) >= 16 * M


def offsets_of(
    bench: Bench, trial: Trial, monkeypatch: pytest.MonkeyPatch, span: int | None
) -> list[tuple[str, str, int, int]]:
    """(direction, file, offset, length) of every request."""
    seen: list[tuple[str, str, int, int]] = []
    for name in ("read", "write"):
        real = getattr(AsyncIO, name)

        def spy(
            io: AsyncIO, file: File, buffer: memoryview, offset: int = 0, *, real: Any = real, name: str = name
        ) -> Any:
            seen.append((name, Path(file.path).name, offset, len(buffer)))
            return real(io, file, buffer, offset)

        monkeypatch.setattr(AsyncIO, name, spy)
    bench.run(trial, span_bytes=span)
    return seen


@pytest.mark.parametrize("span", [None, M])
@pytest.mark.parametrize("at", [(64 * K, 4, 2), (256 * K, 2, 1), (M, 4, 2)])
def test_requests_stay_inside_the_files_and_the_region(
    bench: Bench, backend: str, monkeypatch: pytest.MonkeyPatch, span: int | None, at: tuple[int, int, int]
) -> None:
    trial = Trial(workload=Workload.MIX, point=point(backend, *at), seconds=0.03)
    seen = offsets_of(bench, trial, monkeypatch, span)
    assert all(offset + length <= (span or 4 * M) and length % at[0] == 0 for _, _, offset, length in seen)
    assert {name for _, name, _, _ in seen} == ({"a", "b"} if at[2] == 2 else {"a"})
    if span is None and at[0] < M:
        for direction in ("read", "write"):
            assert len({offset for way, _, offset, _ in seen if way == direction}) > 1


def test_small_blocks_are_split_by_the_engine(bench: Bench, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(workload=Workload.READ, point=point(backend, 4 * K, 1), seconds=0.03)
    seen = offsets_of(bench, trial, monkeypatch, None)
    assert {length for _, _, _, length in seen} == {measure.LEAST_QUEUED // measure.REQUESTS}


def test_a_block_as_large_as_the_file_works(bench: Bench, backend: str) -> None:
    found = bench.run(Trial(workload=Workload.READ, point=point(backend, 4 * M, 1), seconds=0.02))
    assert found.read > 0


def test_stopping_between_requests(bench: Bench, backend: str) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    bench.check = stop
    with pytest.raises(KeyboardInterrupt):
        bench.run(Trial(workload=Workload.WRITE, point=point(backend, 64 * K, 4), seconds=30.0))


def test_a_failing_transfer_is_an_error_with_path_and_offset(bench: Bench, backend: str) -> None:
    victim = bench.files.paths[0]
    with open(victim, "r+b") as file:
        file.truncate(M)
    with pytest.raises(OSError, match=r"read of .*a failed at offset") as caught:
        bench.run(Trial(workload=Workload.READ, point=point(backend, 256 * K, 4), seconds=0.2))
    assert caught.value.errno == errno.ENODATA


def test_small_pages_are_small(tmp_path: Path) -> None:
    files = FileSet(paths=(tmp_path / "a",), file_bytes=M)
    with Bench(files, buffer_bytes=8 * M, huge_pages=False) as small:
        assert small.page_kind == "small"


def test_threads_for_a_point() -> None:
    assert num_threads(Point(backend="threads", block_bytes=M, queue_depth=4)) == 4
    assert num_threads(Point(backend="threads", block_bytes=M, queue_depth=500)) == measure.MAX_THREADS

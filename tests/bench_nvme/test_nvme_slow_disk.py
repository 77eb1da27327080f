"""`lamina nvme` on a disk that is far too slow for what is planned: it ends in time, with what there is."""

from pathlib import Path
from typing import Any, cast

import pytest
from nvme_toys import Ticking, leftovers, point, ticking

from lamina.aio_native import AsyncIO, File, Handle
from lamina.bench.nvme import command, measure, session
from lamina.bench.nvme.args import parse
from lamina.bench.nvme.budget import Allowance
from lamina.bench.nvme.measure import Bench, FileSet, create_files
from lamina.bench.nvme.outcome import Outcome
from lamina.bench.nvme.points import Space, Workload
from lamina.bench.report import Reporter

MIB = 1 << 20


def slow_io(clock: Ticking) -> type[AsyncIO]:
    """Takes 20 ms for each MiB, in the thread that submits."""

    class SlowIO(AsyncIO):
        def write(self, file: File, buffer: Any, offset: int = 0, **more: Any) -> Handle:
            clock.now += 0.02 * len(buffer) / MIB
            return super().write(file, buffer, offset, **more)

        def read(self, file: File, buffer: Any, offset: int = 0, **more: Any) -> Handle:
            clock.now += 0.02 * len(buffer) / MIB
            return super().read(file, buffer, offset, **more)

    return SlowIO


def test_files_stay_short_when_writing_them_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time", Ticking(1.0))
    monkeypatch.setattr(measure, "FILL_STEP", MIB)
    files = FileSet(paths=(tmp_path / "a", tmp_path / "b"), file_bytes=8 * MIB)
    with Bench(files, buffer_bytes=2 * MIB) as bench:
        created = create_files(
            files, bench.buffer.view, backend="threads", check=lambda: None, most_s=2.5, least_bytes=MIB
        )
        written = bytes(bench.buffer.view[:MIB])
    assert created.file_bytes == 2 * MIB
    assert created.written_bytes == 4 * MIB
    assert [path.stat().st_size for path in files.paths] == [2 * MIB, 2 * MIB]
    assert all(path.read_bytes()[:MIB] == written for path in files.paths)
    assert "4194304 bytes in all instead of 16777216" in created.notes[-1]


def test_what_a_trial_needs_is_written_however_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time", Ticking(1.0))
    monkeypatch.setattr(measure, "FILL_STEP", MIB)
    files = FileSet(paths=(tmp_path / "a",), file_bytes=8 * MIB)
    with Bench(files, buffer_bytes=2 * MIB) as bench:
        created = create_files(
            files, bench.buffer.view, backend="threads", check=lambda: None, most_s=0.0, least_bytes=5 * MIB
        )
    assert created.file_bytes == 5 * MIB


def test_a_slow_disk_is_not_asked_for_deep_queues() -> None:
    space = Space(backends=("uring",), blocks=(MIB, 8 * MIB), depths=(1, 64), max_inflight_bytes=128 * MIB)
    slow = session.for_slow_disk(space, 40e6)
    assert slow.allows(point(block=8 * MIB, depth=1))
    assert not slow.allows(point(block=MIB, depth=64))
    assert session.for_slow_disk(space, 2e9) == space
    assert session.for_slow_disk(space, 1.0).max_inflight_bytes == MIB  # the smallest is always tried


def test_the_deadline_holds_on_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ticking(monkeypatch)
    monkeypatch.setattr(measure, "AsyncIO", slow_io(clock))
    monkeypatch.setattr(command, "LEAST_DEADLINE_S", 1.0)
    monkeypatch.setattr(session, "SETUP_LEAST_S", 0.3)
    options = parse(
        [
            "--seconds",
            "2.5",
            "--size",
            "128MiB",
            "--files",
            "1",
            "--processes",
            "2",
            "--extras",
            "none",
            str(tmp_path),
        ]
    )
    began = clock.now
    with command.Interrupt() as interrupt:
        outcome = command._measure(options, Reporter(as_json=True), interrupt, began)
    assert outcome.seconds < 4.0, "one deep trial as planned would take 10 s"
    (found,) = outcome.paths
    assert found.best[Workload.READ].rate.median > 0
    assert found.file_bytes < 128 * MIB
    assert any("instead of 134217728" in note for note in found.notes)
    assert leftovers(tmp_path) == []


def test_no_time_for_a_single_figure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_DEADLINE_S", 0.1)
    with pytest.raises(session.TooSlowError, match="not one measurement was done in time"):
        command.main(["--seconds", "0.1", "--size", "8MiB", "--block-sizes", "64K", "--extras", "none", str(tmp_path)])
    assert leftovers(tmp_path) == []


def test_late_extras_are_left_out_unless_they_were_named(tmp_path: Path) -> None:
    class Late:
        left = 0.5

        def take(self, name: str) -> float:
            return 0.1

    watch = session.Watch(interrupted=lambda: None, told=lambda text: None, time=cast(Allowance, Late()))
    outcome = Outcome(paths=[])
    command._extras(parse(["--seconds", "60", str(tmp_path)]), outcome, cast(session.Session, None), watch)
    assert outcome.skipped == dict.fromkeys(("memory", "device", "allgather"), command.NO_TIME)
    assert outcome.rates == {}

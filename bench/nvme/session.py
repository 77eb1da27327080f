"""Measuring one path: its files, the search, and what is asked about the best points."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lamina.bench.report import format_bytes
from lamina.tiers.links.device_identity import identify

from .args import Options
from .budget import Allowance, OutOfTime
from .fio import FioError, FioResult, find_fio, run_fio
from .fleet import Fleet, Order, median_sum
from .folder import PrivateFolder
from .measure import Bench, Created, FileSet, create_files
from .outcome import FioPair, PageEffect, PathOutcome
from .points import MIB, Measured, Point, Space, Trial, Workload
from .search import Schedule, next_trial
from .space import check_space, fits
from .verdict import best, doubts, recommend, summarise

REGION_BYTES = 32 * MIB
ROUNDS = 5
"""Of huge and small pages in turn."""
FLEET_ROUNDS = 3
TRIAL_S = 0.04
"""What a trial takes beyond its seconds."""
SHORTEST_S = 0.02
FIO_START_S = 0.4
"""What a run of fio takes beyond its run time."""
FIO_GRID_SHARE = 0.4
FIO_ROUNDS = (3, 21)
"""Rounds of fio and ours in turn: at least, at most."""
SETUP_SHARE, SETUP_LEAST_S = 0.2, 5.0
"""Of the run's time, and at least: what writing the files may take before they are left shorter."""
QUEUE_MOST_S = 0.25
"""Longest time that a disk may need for what is in flight."""
FIO_HEAD, FIO_MOST = 4, 12
"""Points that fio is tried on: those where we are fastest, and how many in all."""


class TooSlowError(RuntimeError):
    """The time did not suffice for a single figure."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a measurement reports to: `interrupted` raises when a signal asks for the end, `told` takes a line about the
    progress, `time` says how long the next part may take."""

    interrupted: Callable[[], None]
    told: Callable[[str], None]
    time: Allowance

    def check(self) -> None:
        """Raises when a signal asks for the end; OutOfTime when the run's time is over."""
        self.interrupted()
        self.time.check()


class Session:
    """One path being measured. A context manager: the files are gone when it is left."""

    def __init__(self, path: Path, options: Options, space: Space, watch: Watch) -> None:
        self.options, self.space, self.watch = options, space, watch
        watch.time.take("setup")
        self._stack = contextlib.ExitStack()
        try:
            self.folder = self._stack.enter_context(PrivateFolder(path))
            most_files = max(space.files)
            self.file_bytes = options.size_bytes // most_files // 4096 * 4096
            fits(space, options.size_bytes)
            self._check_space()
            self.files = FileSet(
                paths=tuple(self.folder.data_file("data", number) for number in range(most_files)),
                file_bytes=self.file_bytes,
                direct=options.direct,
            )
            self.bench = self._stack.enter_context(
                self._new_bench(self.files, options.huge_pages, space.max_inflight_bytes)
            )
            created = self._create(self.files, space.backends[0])
            self.file_bytes = created.file_bytes
            self.files = self.bench.files = replace(self.files, file_bytes=created.file_bytes)
            self.space = for_slow_disk(space, created.first_write)
            self.found = PathOutcome(
                path=path,
                identity=identify(path),
                created=created,
                page_kind=self.bench.page_kind,
                file_bytes=self.file_bytes,
                notes=[*created.notes, *(f"removed what a killed run left: {name}" for name in self.folder.removed)],
                written_bytes=created.written_bytes,
            )
            self.found.notes += self.folder.kept
            if self.space.max_inflight_bytes < space.max_inflight_bytes:
                most = format_bytes(self.space.max_inflight_bytes)
                self.found.notes.append(f"settings with more than {most} in flight are left out: the disk is too slow")
        except BaseException:
            self._stack.close()
            raise

    def _create(self, files: FileSet, backend: str, *, share: int = 1) -> Created:
        """The files, as long as their part of the time allows; share: so many sets of files are made."""
        return create_files(
            files,
            self.bench.buffer.view,
            backend=backend,
            check=self.watch.interrupted,
            most_s=max(SETUP_LEAST_S, SETUP_SHARE * self.options.seconds) / share,
            least_bytes=min(files.file_bytes, 2 * max(self.space.blocks)),
        )

    def _check_space(self) -> None:
        wanted, count = self.options.size_bytes, self.options.processes
        if count > 1:
            wanted += count * self._bytes_of_a_process(max(self.space.blocks))
        check_space(self.folder.parent, wanted, in_memory=identify(self.folder.path).file_system in ("tmpfs", "ramfs"))

    def _bytes_of_a_process(self, block_bytes: int) -> int:
        """Of the files of each process, where several run at once."""
        return max(2 * block_bytes, self.options.size_bytes // self.options.processes) // 4096 * 4096

    def _new_bench(self, files: FileSet, huge_pages: bool | None, nbytes: int) -> Bench:
        return Bench(
            files,
            buffer_bytes=nbytes,
            huge_pages=huge_pages,
            read_share=self.options.read_share,
            check=self.watch.check,
        )

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def measure(self) -> None:
        """All parts that concern this path alone, as far as the time goes.

        Raises TooSlowError when it did not suffice for a single measurement.
        """
        self._search()
        if not self.found.best:
            raise TooSlowError(
                f"{self.found.path}: not one measurement was done in time: the disk hangs, or give more --seconds"
            )
        try:
            self._about_the_best()
        except OutOfTime:
            self.found.notes.append("the time was over before everything was measured: give more --seconds")
        self.found.notes += [note for note in self.bench.notes if note not in self.found.notes]
        if self.found.page_kind == "small" and self.options.huge_pages is not False:
            self.found.notes.append(
                "no huge pages were to be had, which can halve the rates: `lamina doctor` tells why"
            )
        if not self.found.created.direct:
            # The warning about the cache says the same, once.
            self.found.notes = [note for note in self.found.notes if "through the page cache" not in note]

    def _about_the_best(self) -> None:
        if self.found.chosen is not None:
            self._pages(self.found.chosen)
            self._region(self.found.chosen)
            if self.options.processes > 1:
                self._processes(self.found.chosen)
        if self.options.fio:
            self._fio()

    def _run(self, bench: Bench, trial: Trial, *, span_bytes: int | None = None) -> Measured:
        measured = bench.run(trial, span_bytes=span_bytes)
        self.count_written(measured)
        rates = " + ".join(f"{rate / 1e9:.2f}" for rate in (measured.read, measured.write) if rate)
        self.watch.told(f"{trial.workload} {trial.point}: {rates} GB/s")
        return measured

    def count_written(self, measured: Measured) -> None:
        """Wear: the bytes of a trial, its warm-up and end included."""
        self.found.written_bytes += int(measured.write * measured.cost_s)

    def _search(self) -> None:
        began = time.perf_counter()
        seconds = self.watch.time.take("search")
        schedule = Schedule(seconds=seconds, shortest_s=min(0.08, max(0.01, seconds / 200)))
        results = self.found.results
        with contextlib.suppress(OutOfTime):  # what there is by then is judged
            while (trial := next_trial(self.space, results, schedule, time.perf_counter() - began)) is not None:
                results.append(self._run(self.bench, trial))
        for workload in self.space.workloads:
            found = best(results, workload)
            if found is not None:
                self.found.best[workload] = found
        self.found.chosen = recommend(results, self.space.workloads)

    def _pages(self, point: Point) -> None:
        """The same with small pages, in turn with the others."""
        available = self.watch.time.take("pages")
        if self.found.page_kind == "small":
            return
        workloads = [workload for workload in self.space.workloads if workload is not Workload.MIX]
        seconds = max(SHORTEST_S, available / (2 * ROUNDS * max(1, len(workloads))) - TRIAL_S)
        # As much memory as the trials use, no more: filling small pages takes long.
        nbytes = min(self.space.max_inflight_bytes, 2 * point.inflight_bytes)
        with self._new_bench(self.files, False, nbytes) as small:
            for workload in workloads:
                trial = Trial(workload=workload, point=point, seconds=seconds)
                pairs = [(self._run(self.bench, trial).rate, self._run(small, trial).rate) for _ in range(ROUNDS)]
                self.found.pages[workload] = PageEffect(
                    huge=summarise(huge for huge, _ in pairs), small=summarise(little for _, little in pairs)
                )

    def _region(self, point: Point) -> None:
        """Whether a small part of a file is read faster than all of it."""
        available = self.watch.time.take("region")
        span = max(REGION_BYTES, 2 * point.block_bytes)
        if self.file_bytes < 4 * span or Workload.READ not in self.space.workloads:
            return
        trial = Trial(workload=Workload.READ, point=point, seconds=max(SHORTEST_S, available / 6 - TRIAL_S))
        gains = [
            self._run(self.bench, trial, span_bytes=span).rate / self._run(self.bench, trial).rate for _ in range(3)
        ]
        self.found.region_gain = statistics.median(gains)

    def _processes(self, point: Point) -> None:
        """Several processes at once, each with files of its own."""
        count = self.options.processes
        available = self.watch.time.take("processes")
        each = self._bytes_of_a_process(point.block_bytes)
        orders = []
        for number in range(count):
            files = FileSet(
                paths=tuple(self.folder.data_file("data", number, index) for index in range(point.files)),
                file_bytes=each // point.files // 4096 * 4096,
                direct=self.options.direct,
            )
            created = self._create(files, point.backend, share=count)
            self.found.written_bytes += created.written_bytes
            files = replace(files, file_bytes=created.file_bytes)
            orders.append(self.order(files, point, share=count))
        seconds = max(SHORTEST_S, available / (FLEET_ROUNDS * max(1, len(self.space.workloads))) - TRIAL_S)
        with Fleet(orders) as fleet:
            self.found.processes = run_fleet(fleet, [point] * count, self.space.workloads, seconds, [self] * count)

    def order(self, files: FileSet, point: Point, *, share: int = 1) -> Order:
        """What a process of its own needs to work on files of this path."""
        return Order(
            files=files,
            buffer_bytes=max(point.block_bytes, min(self.space.max_inflight_bytes // share, 2 * point.inflight_bytes)),
            huge_pages=self.options.huge_pages,
            read_share=self.options.read_share,
        )

    def _fio(self) -> None:
        available = self.watch.time.take("fio")
        try:
            if not self.found.created.direct:
                raise FioError("the path has no direct I/O: fio would measure the page cache too")
            program, _ = find_fio()
            for workload in self.found.best:
                self.found.fio.append(self._fio_pair(program, workload, available / len(self.found.best)))
        except FioError as error:
            self.found.notes.append(f"no comparison with fio: {error}")

    def _fio_pair(self, program: str, workload: Workload, seconds: float) -> FioPair:
        """fio over the grid for a part of the time, then both at their best, and ours at fio's settings, in turn."""
        began = time.perf_counter()
        mine = self.found.best[workload].point
        points = fio_points(self.space, self.found.results, mine, workload)
        each = max(0.1, min(0.5, FIO_GRID_SHARE * seconds / len(points) - FIO_START_S))

        def fio(point: Point) -> FioResult:
            return self._run_fio(program, point, workload, each)

        tried: dict[Point, FioResult] = {}
        for point in points:
            if tried and time.perf_counter() - began > FIO_GRID_SHARE * seconds:
                break
            tried[point] = fio(point)
        top = best_of_fio(tried, huge_pages=self.found.page_kind != "small")
        rounds: list[tuple[float, float, FioResult]] = []
        while len(rounds) < FIO_ROUNDS[0] or (len(rounds) < FIO_ROUNDS[1] and time.perf_counter() - began < seconds):
            # In turns, and in turning order: what disturbs the disk meets all alike.
            theirs = fio(top) if len(rounds) % 2 else None
            ours = self._run(self.bench, Trial(workload=workload, point=mine, seconds=each)).rate
            same = self._run(self.bench, Trial(workload=workload, point=top, seconds=each)).rate
            rounds.append((ours, same, theirs or fio(top)))
        return FioPair(
            workload=workload,
            point=mine,
            fio_point=top,
            ours=tuple(ours for ours, _, _ in rounds),
            same=tuple(same for _, same, _ in rounds),
            fio=tuple(theirs.rate for _, _, theirs in rounds),
            fio_page_kind=rounds[-1][2].page_kind,
            grid={point: result.rate for point, result in tried.items()},
        )

    def _run_fio(self, program: str, point: Point, workload: Workload, seconds: float) -> FioResult:
        result = run_fio(
            program,
            self.files.paths[0],
            point,
            workload,
            nbytes=self.file_bytes,
            seconds=seconds,
            read_share=self.options.read_share,
            huge_pages=self.found.page_kind != "small",
            check=self.watch.check,
        )
        self.found.written_bytes += int(result.write * seconds)
        self.watch.told(f"fio {workload} {point}: {result.rate / 1e9:.2f} GB/s")
        return result

    def judge(self, copy_rate: float | None) -> None:
        """Warnings, once everything is known."""
        found = self.found
        found.warned = doubts(
            found.best,
            found.results,
            path=str(found.path),
            direct=found.created.direct,
            reason=found.created.reason,
            copy_rate=copy_rate,
            small_region_gain=found.region_gain,
        )


def for_slow_disk(space: Space, rate: float) -> Space:
    """Without the points whose bytes in flight take this disk long: they would eat the time up, and teach nothing.

    rate: bytes per second that the disk was seen to write.
    """
    least = min(space.blocks) * min(space.depths)
    return replace(space, max_inflight_bytes=max(least, min(space.max_inflight_bytes, int(QUEUE_MOST_S * rate))))


def fio_points(space: Space, results: Sequence[Measured], mine: Point, workload: Workload) -> list[Point]:
    """The points of our backend that we have measured, the most promising first: ours at its best, then by our rate.

    One file each: that is how fio is run here.
    """
    rates: dict[Point, float] = {}
    for result in results:
        if result.trial.workload is workload and result.trial.point.backend == mine.backend:
            point = replace(result.trial.point, files=1)
            rates[point] = max(rates.get(point, 0.0), result.rate)
    ranked = sorted(rates, key=lambda point: -rates[point])
    # Every other one of the rest: fio's best need not be ours.
    head, rest = ranked[:FIO_HEAD], ranked[FIO_HEAD:]
    return list(dict.fromkeys([replace(mine, files=1), *head, *rest[::2]]))[:FIO_MOST]


def best_of_fio(tried: Mapping[Point, FioResult], *, huge_pages: bool) -> Point:
    """fio's fastest point among those where its memory was of the same kind as ours; of all when there is none.

    Few bytes in flight cannot lie in huge pages without pages set aside for that.
    """
    alike = [point for point, result in tried.items() if (result.page_kind != "small") == huge_pages]
    return max(alike or tried, key=lambda point: tried[point].rate)


def run_fleet(
    fleet: Fleet, points: Sequence[Point], workloads: Sequence[Workload], seconds: float, sessions: Sequence[Session]
) -> dict[Workload, tuple[float, float]]:
    """(read, write) of all processes at once, medians of three rounds, for each workload.

    sessions: whose path each process works on.
    """
    sums = {}
    watch = sessions[0].watch
    for workload in workloads:
        trials = [Trial(workload=workload, point=point, seconds=seconds) for point in points]
        rounds = []
        for _ in range(FLEET_ROUNDS):
            watch.check()
            rounds.append(fleet.run(trials))
            for session, measured in zip(sessions, rounds[-1], strict=True):
                session.count_written(measured)
        sums[workload] = median_sum(rounds)
        watch.told(f"{workload}, {len(points)} at once: {sum(sums[workload]) / 1e9:.2f} GB/s")
    return sums

"""File I/O beside fio: ratios of rates and CPU time taken pairwise in one run. Run: `python -m lamina.bench aio --path DIR`.

Every round runs fio and lamina one after the other on the same file, block size and depth, so that a drift of the device
hits both; what is compared is the median of the rounds' ratios. Cached files would tell nothing: everything is direct.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.aio_native import (
    AlignedBuffer,
    AsyncIO,
    BackendUnavailableError,
    File,
    Priority,
    Read,
    Write,
    backend_report,
)

from .report import Reporter

MIB, GIB = 1 << 20, 1 << 30
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
SHAPES = ((1 * MIB, 8), (1 * MIB, 32), (8 * MIB, 8))
BACKENDS = ("uring", "threads")
SMALL = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to move and how."""

    direction: str
    """read, write or rw: half of the bytes read, half written, at once"""
    block_bytes: int
    depth: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured run."""

    gbps: float
    """1e9 bytes per second, both directions together"""
    cpu_s_per_gib: float


@dataclass
class Series:
    """The samples of one subject at one shape, round by round; None where the subject failed."""

    samples: list[Sample] = field(default_factory=list)

    def gbps(self) -> float:
        return statistics.median(sample.gbps for sample in self.samples)

    def cpu(self) -> float:
        return statistics.median(sample.cpu_s_per_gib for sample in self.samples)

    def spread(self) -> str:
        values = [sample.gbps for sample in self.samples]
        return f"{min(values):.2f}–{max(values):.2f}"


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(nbytes: int, work: Callable[[], object]) -> Sample:
    cpu, start = cpu_seconds(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return Sample(gbps=nbytes / seconds / 1e9, cpu_s_per_gib=cpu / (nbytes / GIB))


class Fio:
    """fio's io_uring engine on one file."""

    def __init__(self, path: Path, memory: str) -> None:
        self._path = path
        self.memory = memory

    def _run(self, *options: str) -> dict[str, Any]:
        command = ["fio", "--name=lamina", f"--filename={self._path}", "--direct=1", "--ioengine=io_uring"]
        command += [f"--iomem={self.memory}", "--output-format=json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fio failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-300:]}")
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job

    def run(self, shape: Shape) -> Sample:
        job = self._run(
            f"--rw={shape.direction}", f"--bs={shape.block_bytes}", f"--iodepth={shape.depth}", f"--size={shape.nbytes}"
        )
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        rate = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Sample(gbps=rate / 1e9, cpu_s_per_gib=cpu / (moved / GIB))

    def latency_us(self, nbytes: int, reads: int) -> float:
        """Median of one small random read at a time, submission and completion."""
        job = self._run("--rw=randread", f"--bs={SMALL}", "--iodepth=1", f"--size={nbytes}", f"--number_ios={reads}")
        read = job["read"]
        return float(read["clat_ns"]["percentile"]["50.000000"] + read["slat_ns"]["mean"]) / 1000


class Lamina:
    """One backend on one file.

    With `window` the blocks take turns in depth × block bytes of memory, as fio's do: what the processor's cache holds of it
    matters to a virtual disk. Without it every block has its own memory, as in real use.
    """

    def __init__(self, path: Path, backend: str, memory: memoryview, *, register: bool, window: bool) -> None:
        self._path = path
        self._backend = backend
        self._memory = memory
        self._register = register
        self._window = window

    def run(self, shape: Shape) -> Sample:
        settings: dict[str, Any] = {"block_bytes": shape.block_bytes, "queue_depth": shape.depth}
        settings["max_inflight_bytes"] = shape.block_bytes * shape.depth  # as many as fio has
        with AsyncIO(backend=self._backend, num_threads=shape.depth, **settings) as io:  # type: ignore[arg-type]
            if self._register:
                io.register(self._memory)
            with io.open(self._path, writable=True, direct=True) as file:
                requests = self._requests(file, shape)
                return measure(shape.nbytes, lambda: io.submit(requests, priority=Priority.DEMAND).wait())

    def _requests(self, file: File, shape: Shape) -> list[Read | Write]:
        if shape.direction != "rw":
            kind = Read if shape.direction == "read" else Write
            if not self._window:
                return [kind(file, self._memory[: shape.nbytes])]
            starts = range(0, shape.nbytes, shape.block_bytes)
            return [kind(file, self._place(i, start, shape), start) for i, start in enumerate(starts)]
        mixed: list[Read | Write] = []
        half = shape.nbytes // 2
        for start in range(0, half, shape.block_bytes):  # half is read, half written, in turns as fio does
            mixed.append(Read(file, self._place(len(mixed), start, shape), start))
            mixed.append(Write(file, self._place(len(mixed), half + start, shape), half + start))
        return mixed

    def _place(self, number: int, start: int, shape: Shape) -> memoryview:
        begin = number % shape.depth * shape.block_bytes if self._window else start
        return self._memory[begin : begin + shape.block_bytes]

    def latency_us(self, nbytes: int, reads: int, *, now: bool) -> float:
        """Median of one small random read at a time through Python: read_now(), or read() and wait()."""
        rng, taken = random.Random(1), []
        with AsyncIO(backend=self._backend) as io, io.open(self._path, direct=True) as file:  # type: ignore[arg-type]
            target = self._memory[:SMALL]
            for _ in range(reads):
                offset = rng.randrange(nbytes // SMALL) * SMALL
                start = time.perf_counter_ns()
                if now:
                    io.read_now(file, target, offset)
                else:
                    io.read(file, target, offset).wait()
                taken.append(time.perf_counter_ns() - start)
        return statistics.median(taken) / 1000


class DeepSpeed:
    """DeepSpeed's async_io handle with its own page-locked tensor."""

    def __init__(self, path: Path, nbytes: int) -> None:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder
        self._torch = importlib.import_module("torch")
        self._aio = builder().load(verbose=False)
        self._path = str(path)
        self._pool = self._aio.aio_handle(MIB, 32, False, True, 1)
        empty = self._torch.empty(nbytes, dtype=self._torch.uint8)
        self._tensor = self._pool.new_cpu_locked_tensor(nbytes, empty)

    def run(self, shape: Shape) -> Sample:
        handle = self._aio.aio_handle(shape.block_bytes, shape.depth, False, True, 1)
        move = handle.sync_pread if shape.direction == "read" else handle.sync_pwrite
        return measure(shape.nbytes, lambda: move(self._tensor[: shape.nbytes], self._path, 0))


@contextlib.contextmanager
def reserved_huge_pages(count: int) -> Iterator[None]:
    """Sets vm.nr_hugepages for the time of the run (needs root) and puts the old value back."""
    before = HUGE_PAGES.read_text()
    HUGE_PAGES.write_text(f"{count}\n")
    try:
        yield
    finally:
        HUGE_PAGES.write_text(before)


def free_huge_pages() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


def fio_memory(wanted_bytes: int) -> tuple[str, str]:
    """(fio's --iomem, what to tell about it)."""
    wanted, free = -(-wanted_bytes // (2 * MIB)) + 2, free_huge_pages()
    if free >= wanted:
        return "mmaphuge", f"fio uses hugetlb pages ({free} free)"
    return "malloc", (
        f"fio uses ordinary 4 KiB pages ({free} hugetlb pages are free, {wanted} are needed): the ratios flatter lamina. "
        f"Compare with --reserve-huge-pages {wanted} as root"
    )


Subjects = dict[str, Callable[[Shape], Sample]]


def lamina_subjects(path: Path, aligned: memoryview, ordinary: memoryview) -> Subjects:
    """The backends that this machine allows: as fio does it; with memory for all; with ordinary unaligned memory for all."""
    subjects: Subjects = {}
    for backend in BACKENDS:
        try:
            AsyncIO(backend=backend).close()  # type: ignore[arg-type]
        except BackendUnavailableError:
            continue
        subjects[backend] = Lamina(path, backend, aligned, register=True, window=True).run
        subjects[f"{backend}, large"] = Lamina(path, backend, aligned, register=True, window=False).run
        subjects[f"{backend}, ordinary"] = Lamina(path, backend, ordinary, register=False, window=False).run
    return subjects


def run_rounds(
    subjects: Subjects, shapes: Sequence[Shape], rounds: int, report: Reporter
) -> dict[Shape, dict[str, Series]]:
    """Every subject at every shape once a round; every other round in reverse, so that order favours nobody."""
    results: dict[Shape, dict[str, Series]] = {shape: {name: Series() for name in subjects} for shape in shapes}
    with report.progress(rounds * len(shapes), title="rounds") as progress:
        for number in range(rounds):
            for shape in shapes:
                names = list(subjects) if number % 2 == 0 else list(subjects)[::-1]
                for name in names:
                    if shape.direction != "rw" or "DeepSpeed" not in name:
                        results[shape][name].samples.append(subjects[name](shape))
                progress.advance(f"round {number + 1}: {shape.direction}")
    return results


def ratio(mine: Series, theirs: Series, attribute: str) -> float | None:
    """Median of the rounds' ratios; None where there is nothing to compare with."""
    pairs = [
        (getattr(a, attribute), getattr(b, attribute))
        for a, b in zip(mine.samples, theirs.samples, strict=False)
        if getattr(b, attribute) > 0
    ]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def show(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def tabulate(results: dict[Shape, dict[str, Series]], report: Reporter) -> list[dict[str, Any]]:
    """Prints one table for each shape; returns the figures as plain data."""
    rows: list[dict[str, Any]] = []
    for shape, series in results.items():
        base, lines = series.get("fio"), []
        for name, mine in series.items():
            if not mine.samples:
                continue
            against = ratio(mine, base, "gbps") if base else None
            aligned = series.get(name.replace("ordinary", "large"))
            kept = ratio(mine, aligned, "gbps") if aligned and "ordinary" in name else None
            cpu = ratio(mine, base, "cpu_s_per_gib") if base else None
            row = {"subject": name, "direction": shape.direction, "block_bytes": shape.block_bytes}
            row |= {"depth": shape.depth, "gbps": mine.gbps(), "cpu_s_per_gib": mine.cpu()}
            row |= {"gbps_to_fio": against, "cpu_to_fio": cpu, "gbps_to_large": kept}
            rows.append(row)
            figures = [show(mine.gbps()), mine.spread(), show(against), show(kept), show(mine.cpu(), 4), show(cpu)]
            lines.append([name, *figures])
        report.table(
            f"{shape.direction}, {shape.nbytes // MIB} MiB in blocks of {shape.block_bytes // MIB} MiB, depth {shape.depth}",
            ["", "GB/s", "range", "to fio", "to large", "CPU s/GiB", "to fio"],
            lines,
        )
    return rows


def latencies(
    path: Path, nbytes: int, fio: Fio | None, aligned: memoryview, rounds: int, reads: int
) -> dict[str, float]:
    """Median microseconds of a 4 KiB read by subject; medians over the rounds."""
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        if fio:
            taken.setdefault("fio", []).append(fio.latency_us(nbytes, reads))
        for backend in BACKENDS:
            with contextlib.suppress(BackendUnavailableError):
                subject = Lamina(path, backend, aligned, register=True, window=True)
                for name, now in ((f"{backend}, read_now()", True), (f"{backend}, read().wait()", False)):
                    taken.setdefault(name, []).append(subject.latency_us(nbytes, reads, now=now))
    return {name: statistics.median(values) for name, values in taken.items()}


def add_deepspeed(subjects: Subjects, path: Path, nbytes: int, report: Reporter) -> None:
    """DeepSpeed's handle joins in when it is installed and builds."""
    if importlib.util.find_spec("deepspeed") is None:
        report.line("DeepSpeed is not installed here: its async_io handle is left out")
        return
    try:
        subjects["DeepSpeed, pinned"] = DeepSpeed(path, nbytes).run
    except Exception as error:  # noqa: BLE001 - its build can fail in any way, which is no failure of ours
        report.warning(f"DeepSpeed's async_io cannot be used: {type(error).__name__}: {error}")


def make_shapes(directions: Sequence[str], nbytes: int, quick: bool) -> list[Shape]:
    shapes = SHAPES[1:2] if quick else SHAPES
    return [
        Shape(direction=direction, block_bytes=min(block, nbytes // 2), depth=depth, nbytes=nbytes)
        for direction in directions
        for block, depth in shapes
    ]


def find_fio(path: Path, shapes: Sequence[Shape], report: Reporter) -> Fio | None:
    """fio with the best memory that is free now; None when it is not installed."""
    if shutil.which("fio") is None:
        report.line("fio is not installed: there are no ratios to it")
        return None
    memory, remark = fio_memory(max(shape.block_bytes * shape.depth for shape in shapes))
    report.line(remark)
    return Fio(path, memory)


def report_latencies(latency_us: dict[str, float], reads: int, report: Reporter) -> None:
    base = latency_us.get("fio")
    report.table(
        f"one {SMALL} byte read at a time, median of {reads} (lamina: through Python)",
        ["", "us", "us over fio"],
        [[name, show(us, 1), show(us - base if base else None, 1)] for name, us in latency_us.items()],
    )


def compare(folder: Path, args: argparse.Namespace, buffer: AlignedBuffer, report: Reporter) -> dict[str, Any]:
    """The whole comparison, on one file of its own in `folder` that is gone afterwards."""
    nbytes, path = args.size_mib * MIB, folder / "bench.bin"
    facts, machine = report.machine(), backend_report(folder)
    report.line(str(machine))
    shapes = make_shapes(args.directions, nbytes, args.quick)
    fio = find_fio(path, shapes, report)
    ordinary = memoryview(bytearray(nbytes + 1))[1:]
    ordinary[::SMALL] = b"x" * len(ordinary[::SMALL])
    with AsyncIO() as io, io.open(path, create=True, size=nbytes, direct=True) as file:
        io.write(file, buffer.view).wait()
    report.line(f"lamina's memory: {buffer.page_kind} pages")
    subjects: Subjects = {"fio": fio.run} if fio else {}
    subjects |= lamina_subjects(path, buffer.view, ordinary)
    add_deepspeed(subjects, path, nbytes, report)
    rows = tabulate(run_rounds(subjects, shapes, args.rounds, report), report)
    report.line("large: memory of its own for every block (fio and the plain rows go round in depth × block bytes)")
    report.line("ordinary: the same with an unaligned bytearray\n")
    small = latencies(path, nbytes, fio, buffer.view, args.rounds, args.reads)
    report_latencies(small, args.reads, report)
    return {"machine": facts, "backend": machine.as_dict(), "fio_memory": fio.memory if fio else None} | {
        "page_kind": buffer.page_kind,
        "rounds": args.rounds,
        "transfers": rows,
        "latency_us": small,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lamina aio", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=Path("."), help="a directory on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=1024, help="size of the file (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are taken over them (default 5)")
    parser.add_argument("--reads", type=int, default=2000, help="reads for the latency (default 2000)")
    parser.add_argument("--directions", nargs="+", choices=("read", "write", "rw"), default=["read", "write", "rw"])
    parser.add_argument("--quick", action="store_true", help="one block size and depth only")
    parser.add_argument(
        "--reserve-huge-pages",
        type=int,
        metavar="N",
        help="set vm.nr_hugepages to N while it runs, for fio (needs root), and set it back",
    )
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout, the rest on stderr")
    args = parser.parse_args(argv)
    for name in ("size_mib", "rounds", "reads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints tables and, last, one JSON line. Returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    report = Reporter(as_json=args.json)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".lamina-aio-", dir=args.path)))
        buffer = stack.enter_context(AlignedBuffer(args.size_mib * MIB))
        buffer.view[::SMALL] = b"x" * len(buffer.view[::SMALL])  # page faults are not the disk's
        if args.reserve_huge_pages is not None:  # after lamina has its memory: these are for fio
            stack.enter_context(reserved_huge_pages(args.reserve_huge_pages))
        result = compare(folder, args, buffer, report)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""File I/O beside fio: ratios of rates and CPU time taken pairwise in one run. Run: `python -m lamina.bench aio --path DIR`.

Every round runs fio and lamina one after the other on the same file, block size and depth, so that a drift of the device
hits both; what is compared is the median of the rounds' ratios. Cached files would tell nothing: everything is direct.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lamina.aio_native import AlignedBuffer, AsyncIO, BackendUnavailableError, backend_report
from lamina.bench.nvme.measure import fill_incompressible
from lamina.bench.report import Reporter

from .rounds import run_rounds, show, tabulate
from .subjects import SMALL, Fio, Lamina, Peer, PeerError, Shape, Subject

MIB = 1 << 20
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
SHAPES = ((1 * MIB, 8), (1 * MIB, 32), (8 * MIB, 8))
BACKENDS = ("uring", "threads")


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


def lamina_subjects(path: Path, aligned: memoryview, ordinary: memoryview) -> dict[str, Subject]:
    """The backends that this machine allows: as fio does it; with memory for all; with ordinary unaligned memory for all."""
    subjects: dict[str, Subject] = {}
    for backend in BACKENDS:
        try:
            AsyncIO(backend=backend).close()  # type: ignore[arg-type]
        except BackendUnavailableError:
            continue
        subjects[backend] = Lamina(path, backend, aligned, register=True, window=True).run
        subjects[f"{backend}, large"] = Lamina(path, backend, aligned, register=True, window=False).run
        subjects[f"{backend}, ordinary"] = Lamina(path, backend, ordinary, register=False, window=False).run
    return subjects


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


def deepspeed_subjects(
    stack: contextlib.ExitStack, python: str | None, path: Path, nbytes: int, report: Reporter
) -> dict[str, Subject]:
    """DeepSpeed's handle where an interpreter that has it was given; a reason is told when it does not work."""
    if python is None:
        report.line("DeepSpeed's async_io handle is left out: --peer-python PYTHON lets it take part")
        return {}
    try:
        peer = stack.enter_context(Peer(python, path, nbytes))
    except PeerError as error:
        report.warning(f"DeepSpeed's async_io cannot be used: {error}")
        return {}
    report.line(
        f"DeepSpeed {peer.version}: its async_io handle, in page-locked memory of its own and in an ordinary tensor"
    )
    return {f"DeepSpeed, {memory}": peer.subject(memory) for memory in ("pinned", "ordinary")}


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
    ordinary[:] = buffer.view
    with AsyncIO() as io, io.open(path, create=True, size=nbytes, direct=True) as file:
        io.write(file, buffer.view).wait()
    report.line(f"lamina's memory: {buffer.page_kind} pages")
    subjects: dict[str, Subject] = {}
    if fio:
        subjects = {"fio": fio.run, "fio, scrambling": Fio(path, fio.memory, scramble=True).run}
    with contextlib.ExitStack() as stack:
        subjects |= lamina_subjects(path, buffer.view, ordinary)
        subjects |= deepspeed_subjects(stack, args.peer_python, path, nbytes, report)
        rows = tabulate(run_rounds(subjects, shapes, args.rounds, report), report)
    report.line(
        "to fio: medians of the rounds' ratios. scrambling: fio's default, which marks each block before it is written"
    )
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
    parser.add_argument(
        "--peer-python", help="an interpreter that has DeepSpeed, whose async_io handle then takes part"
    )
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
        fill_incompressible(buffer.view)  # page faults are not the disk's, and a disk may compress
        if args.reserve_huge_pages is not None:  # after lamina has its memory: these are for fio
            stack.enter_context(reserved_huge_pages(args.reserve_huge_pages))
        result = compare(folder, args, buffer, report)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

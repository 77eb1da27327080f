"""The readable report of a run."""

import json
from collections.abc import Iterator

from lamina.bench.report import Reporter, format_bytes, format_seconds

from .args import Options
from .outcome import Outcome, PathOutcome
from .points import Workload, format_size
from .result import aio_block
from .verdict import Summary, by_point, score, summarise

MEANINGFUL = 3
"""Repeats from which an interval says something about other points."""
RATE_TITLES = {
    "copy": ("memory copy", "read + written, all cores"),
    "triad": ("memory triad", "two streams read, one written"),
    "stream": ("memory, in Adam's shape", "three streams read, three written"),
    "adam": ("Adam, fp32", ""),
    "host_to_device": ("host to device", "page-locked memory"),
    "device_to_host": ("device to host", "page-locked memory"),
    "both_ways": ("both ways at once", "sum of both"),
    "all_gather": ("all-gather, loopback", "received by each of two processes"),
}


def print_outcome(report: Reporter, options: Options, outcome: Outcome) -> None:
    """Everything, then the warnings, then what to paste."""
    for found in outcome.paths:
        _print_path(report, options, found)
    if outcome.together:
        _print_together(report, outcome)
    if outcome.rates:
        report.table("the rest of the path", ("", "GB/s", ""), list(_rate_rows(outcome.rates)))
    for name, reason in outcome.skipped.items():
        report.line(f"not measured: {name}: {reason}")
    written = sum(found.written_bytes for found in outcome.paths)
    report.line(f"took {format_seconds(outcome.seconds)}, wrote {format_bytes(written)} to the disk")
    for found in outcome.paths:
        for note in found.notes:
            report.line(f"note: {note}")
        for warned in found.warned:
            report.line(f"WARNING, {warned.doubt}: {warned.text}")
    for found in outcome.paths:
        if found.chosen is not None:
            report.line(f"for the config, {found.path} ({found.chosen}):")
            report.line(json.dumps(aio_block(found.chosen), indent=2))


def _print_path(report: Reporter, options: Options, found: PathOutcome) -> None:
    how = "direct I/O" if found.created.direct else "page cache, NOT the disk"
    report.line(
        f"{found.path}: {found.identity}; {how}, {found.page_kind} pages, alignment {found.created.alignment}, "
        f"space {'reserved' if found.created.preallocated else 'not reserved'}"
    )
    columns = ("best, GB/s", "read", "write", "settings", "a piece", "likely", "n")
    report.table("best", columns, list(_best_rows(found)))
    for line in _rival_lines(found):
        report.line(line)
    if found.chosen is not None:
        _print_chosen(report, found)
    steady = found.best.get(Workload.WRITE)
    if steady is not None:
        share = found.created.first_write / steady.rate.median
        report.line(
            f"first write to fresh space {found.created.first_write / 1e9:.2f} GB/s, "
            f"{share:.0%} of rewriting in place at its best"
        )
        report.line()
    report.table("best with", ("GB/s", *(str(w) for w in found.best)), list(_choice_rows(found)))
    if found.pages:
        rows = [
            (workload, _interval(effect.huge), _interval(effect.small), f"{effect.gain:.2f} x")
            for workload, effect in found.pages.items()
        ]
        report.line(f"pages of the buffers, GB/s at {found.chosen}, measured in turn")
        report.table("pages", ("", f"{found.page_kind} 2 MiB", "4 KiB", "gain"), rows)
    if found.processes:
        _print_processes(report, options, found)
    if found.fio:
        _print_fio(report, found)
    if options.grid:
        for workload in found.best:
            _print_grid(report, found, workload)


def _interval(summary: Summary) -> str:
    return f"{summary.median / 1e9:.2f} ({summary.low / 1e9:.2f} to {summary.high / 1e9:.2f})"


def _best_rows(found: PathOutcome) -> Iterator[tuple[str, ...]]:
    for workload, one in found.best.items():
        rate = one.rate
        likely = f"{rate.low / 1e9:.2f}-{rate.high / 1e9:.2f} {rate.sure:.0%}" if rate.samples > 1 else "once"
        yield (
            str(workload),
            _gbps(one.read),
            _gbps(one.write),
            str(one.point),
            format_seconds(one.latency_s),
            likely,
            str(rate.samples),
        )


def _gbps(rate: float) -> str:
    return f"{rate / 1e9:.2f}" if rate else ""


def _rival_lines(found: PathOutcome) -> Iterator[str]:
    """How sure it is that the best settings are the best."""
    parts = []
    for workload, one in found.best.items():
        count = len(one.rivals)
        others = f"{count} other settings may be" if count > 1 else "one other may be" if count else "no other is"
        parts.append(f"{workload}: not known" if one.rate.samples < MEANINGFUL else f"{workload}: {others}")
    yield f"as fast: {', '.join(parts)}"
    yield ""


def _print_chosen(report: Reporter, found: PathOutcome) -> None:
    """What one setting for all workloads reaches."""
    rows = []
    for workload in found.best:
        runs = found.at_chosen(workload)
        read, write, rate = (summarise(getattr(run, name) for run in runs).median for name in ("read", "write", "rate"))
        latency = summarise(run.latency_s for run in runs).median
        share = rate / found.best[workload].rate.median
        rows.append((workload, _gbps(read), _gbps(write), f"{share:.0%}", format_seconds(latency)))
    columns = ("GB/s", "read", "write", "of the best", "a piece")
    report.table(f"{found.chosen}, for all", columns, rows)


def _choice_rows(found: PathOutcome) -> Iterator[tuple[str, ...]]:
    """The best rate with each backend, number of files and block size."""
    groups = {workload: by_point(found.results, workload) for workload in found.best}
    for field, name in (("backend", "backend {}"), ("files", "{} files"), ("block_bytes", "blocks of {}")):
        values = sorted({getattr(point, field) for group in groups.values() for point in group})
        for value in values:
            cells = []
            for group in groups.values():
                rates = [score(runs) for point, runs in group.items() if getattr(point, field) == value]
                cells.append(f"{max(rates) / 1e9:.2f}" if rates else "")
            shown = format_size(value) if field == "block_bytes" else value
            yield ("1 file" if (field, value) == ("files", 1) else name.format(shown), *cells)


def _print_processes(report: Reporter, options: Options, found: PathOutcome) -> None:
    rows = []
    for workload, (read, write) in found.processes.items():
        alone = summarise(run.rate for run in found.at_chosen(workload)).median
        rows.append((workload, f"{alone / 1e9:.2f}", f"{(read + write) / 1e9:.2f}", f"{(read + write) / alone:.2f} x"))
    columns = ("", "one process", f"{options.processes} processes", "gain")
    report.table("several processes, GB/s in all", columns, rows)


def _print_fio(report: Reporter, found: PathOutcome) -> None:
    rows = [
        (
            pair.workload,
            _gbps(summarise(pair.ours).median),
            str(pair.point),
            _gbps(summarise(pair.fio).median),
            str(pair.fio_point),
            f"{pair.ratio:.2f}",
            f"{pair.same_ratio:.2f}",
        )
        for pair in found.fio
    ]
    rounds = min(len(pair.fio) for pair in found.fio)
    kinds = ", ".join(dict.fromkeys(pair.fio_page_kind for pair in found.fio))
    report.line(f"beside fio: {rounds} rounds or more in turn; pages: ours {found.page_kind}, fio's {kinds}")
    report.table("fio", ("GB/s", "ours", "at", "fio", "at", "ratio", "at fio's"), rows)


def _print_grid(report: Reporter, found: PathOutcome, workload: Workload) -> None:
    """Block sizes down, queue depths across, for the best backend and number of files."""
    top = found.best[workload].point
    cells = {
        (point.block_bytes, point.queue_depth): score(runs)
        for point, runs in by_point(found.results, workload).items()
        if (point.backend, point.files) == (top.backend, min(point.files, top.files))
    }
    depths = sorted({depth for _, depth in cells})
    rows = []
    for block in sorted({block for block, _ in cells}):
        shown = (f"{cells[block, depth] / 1e9:.2f}" if (block, depth) in cells else "" for depth in depths)
        rows.append((format_size(block), *shown))
    report.table(f"{workload}, {top.backend}, GB/s", ("block \\ depth", *map(str, depths)), rows)


def _print_together(report: Reporter, outcome: Outcome) -> None:
    rows = []
    for workload, (read, write) in outcome.together.items():
        alone = [summarise(run.rate for run in found.at_chosen(workload)).median for found in outcome.paths]
        rows.append(
            (
                workload,
                " + ".join(f"{rate / 1e9:.2f}" for rate in alone),
                f"{(read + write) / 1e9:.2f}",
                f"{(read + write) / sum(alone):.0%}",
            )
        )
    report.table("all paths at once, GB/s", ("", "alone", "together", "of the sum"), rows)


def _rate_rows(rates: dict[str, float]) -> Iterator[tuple[str, str, str]]:
    for name, (title, remark) in RATE_TITLES.items():
        if name in rates:
            if name == "adam":
                billions, share = rates["adam_elements"] / 1e9, rates["adam"] / rates["stream"]
                remark = f"{billions:.2f} billion elements/s, {share:.0%} of its shape"
            yield title, f"{rates[name] / 1e9:.2f}", remark

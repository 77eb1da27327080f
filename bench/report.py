"""What every command line prints with: machine facts, tables, a progress line and the last-line JSON."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

COLUMN_GAP = " │ "


def machine_facts() -> dict[str, object]:
    """The machine and software that a figure was taken on; torch's part only when it is imported already."""
    facts: dict[str, object] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
        facts["torch_threads"] = torch.get_num_threads()
        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return facts


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Processor"):
            return value.strip()
    return platform.processor() or platform.machine()


def process_memory() -> dict[str, int]:
    """Resident bytes of this process: `rss` now and `peak_rss` since it began or was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return {name: int(fields[key][0]) * 1024 for name, key in (("rss", "VmRSS"), ("peak_rss", "VmHWM"))}


def reset_peak_memory() -> None:
    """Let `process_memory()["peak_rss"]` begin anew from what is resident now. OSError where /proc forbids it."""
    Path("/proc/self/clear_refs").write_text("5")


def format_bytes(nbytes: float) -> str:
    """Decimal units, three digits: `305 MB`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= 0.9995 * factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`420 us`, `12.3 ms`, `1.92 s`, `4 min 10 s`: whichever unit keeps the figure short."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def fold_widths(cells: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths of a table's columns: what each needs, less where they do not fit in `room`, but never a word's."""
    widths = [max(map(cell_len, column), default=0) for column in cells]
    least = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in cells]
    too_much = sum(widths) + len(COLUMN_GAP) * (len(widths) - 1) - room
    for _ in range(too_much):
        spare = [width - word for width, word in zip(widths, least, strict=True)]
        if not any(spare):
            break
        widest = max(range(len(widths)), key=lambda column: (spare[column] > 0, widths[column]))
        widths[widest] -= 1
    return widths


class Reporter:
    """Where a command prints. With `as_json` stdout gets one JSON line, and stderr the readable part."""

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._readable = self._err if as_json else self._out

    def _columns(self) -> int:
        # Without a terminal rich would fold tables at 80 columns: give them the room they need.
        return Console(file=self._readable).width if self._readable.isatty() else 160

    def line(self, text: str = "") -> None:
        """One readable line, unfolded."""
        print(text, file=self._readable, flush=True)

    def warning(self, text: str) -> None:
        """One line on stderr, whatever the mode."""
        print(f"lamina: {text}", file=self._err, flush=True)

    def machine(self) -> dict[str, object]:
        """Print the machine's facts in one line; returns them for the JSON."""
        facts = machine_facts()
        shown = {**facts, "memory_bytes": format_bytes(int(str(facts["memory_bytes"])))}
        known = {name.removesuffix("_bytes"): value for name, value in shown.items() if value is not None}
        self.line("  ".join(f"{name} {value}" for name, value in known.items()))
        return facts

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table: the first column to the left, the others to the right. No word or figure is ever cut."""
        table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
        cells = [[column, *(str(row[position]) for row in rows)] for position, column in enumerate(columns)]
        widths = fold_widths(cells, self._columns())
        for position, (column, width) in enumerate(zip(columns, widths, strict=True)):
            table.add_column(column, justify="left" if position == 0 else "right", width=width)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        needed = sum(widths) + len(COLUMN_GAP) * (len(widths) - 1)
        width = max(self._columns(), needed)
        Console(file=self._readable, width=width, highlight=False, markup=False, emoji=False).print(table)
        self.line()

    def json(self, result: Mapping[str, object]) -> None:
        """The one line of JSON on stdout, only with `as_json`. NaN and infinities become null."""
        if self.as_json:
            print(json.dumps(_finite(result), allow_nan=False), file=self._out, flush=True)

    def progress(self, total: int, *, title: str, plain_lines: int = 10) -> "ProgressLine":
        """A bar on a terminal's stderr, otherwise about `plain_lines` plain lines over the whole run."""
        return ProgressLine(total, title=title, err=self._err, plain_lines=plain_lines)


def _finite(value: object) -> object:
    """`value` with floats that JSON cannot hold replaced by None, and mappings and sequences made plain."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class ProgressLine:
    """Progress of a known number of steps, a context manager. `advance(text)` after each step."""

    def __init__(self, total: int, *, title: str, err: TextIO, plain_lines: int) -> None:
        self._total = total
        self._title = title
        self._err = err
        self._every = max(1, -(-total // plain_lines))
        self._done = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if err.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=Console(file=err),
                transient=True,
            )
            self._task = self._bar.add_task(title, total=total, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, text: str) -> None:
        """One step is done; `text` says how it went."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, text=text)
        elif self._done == 1 or self._done == self._total or self._done % self._every == 0:
            width = len(str(self._total))
            print(f"{self._title} {self._done:{width}}/{self._total}  {text}", file=self._err, flush=True)

"""`lamina doctor`: what this machine offers, found by doing and not by looking, and how to mend what is amiss."""

import argparse
import functools
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from lamina.bench.doctor import io as doctor_io
from lamina.bench.doctor import machine as doctor_machine
from lamina.bench.doctor import of_torch as doctor_torch
from lamina.bench.doctor import path as doctor_path
from lamina.bench.doctor.finding import Finding, State, attempt, worst
from lamina.bench.given_path import folder_argument
from lamina.bench.report import Reporter, machine_facts

REINSTALL = "pip install --force-reinstall lamina"


def parser() -> argparse.ArgumentParser:
    """The options."""
    make = argparse.ArgumentParser(
        prog="lamina doctor",
        description="Say what this machine offers: each thing is tried, and each problem comes with the command that "
        "mends it.",
        allow_abbrev=False,
        epilog="Exit code 0: all works, if need be with warnings; 1: something does not work.",
    )
    make.add_argument(
        "paths", nargs="*", type=folder_argument, metavar="PATH", help="folders for state (the current one)"
    )
    make.add_argument("--config", type=Path, metavar="FILE", help="check this config against the machine")
    make.add_argument("--json", action="store_true", help="one JSON line on stdout, the report on stderr")
    return make


def main(arguments: Sequence[str]) -> int:
    """Run `lamina doctor ARGUMENTS`; returns the exit code."""
    given = parser().parse_args(arguments)
    report = Reporter(as_json=given.json)
    paths = tuple(dict.fromkeys(path.absolute() for path in given.paths)) or (() if given.config else (Path.cwd(),))
    findings = list(examine(paths, given.config))
    for line in render(findings, shutil.get_terminal_size((100, 40)).columns):
        report.line(line)
    failed = worst(findings) is State.FAIL
    report.json(
        {
            "command": "doctor",
            "ok": not failed,
            "machine": machine_facts(),
            "findings": [finding.as_dict() for finding in findings],
        }
    )
    return 1 if failed else 0


def examine(paths: Sequence[Path], config: Path | None) -> Iterator[Finding]:
    """All findings, section by section."""
    yield from attempt("system", "system", doctor_machine.check_system)
    workplace = _workplace(paths)
    backends = functools.partial(doctor_io.check_backends, workplace)
    yield from attempt(doctor_io.SECTION, "backends", backends, mend=REINSTALL)
    for name, check in (
        ("liburing", doctor_io.check_liburing),
        ("registered buffers", doctor_io.check_registration),
        ("huge pages", doctor_io.check_pages),
        ("limits", doctor_io.check_limits),
    ):
        yield from attempt(doctor_io.SECTION, name, check, mend=REINSTALL)
    for path in paths:
        yield from attempt(doctor_path.SECTION, str(path), functools.partial(doctor_path.check_path, path))
    yield from attempt("machine", "memory", doctor_machine.check_memory)
    yield from attempt("machine", "processor", doctor_machine.check_processor)
    yield from attempt("machine", "Adam kernels", doctor_machine.check_kernels, mend=REINSTALL)
    yield from attempt("torch", "torch", doctor_torch.check_build, mend=doctor_torch.INSTALL)
    yield from attempt("torch", "GPU", doctor_torch.check_gpus, mend=doctor_torch.INSTALL)
    yield from attempt("torch", "ranks", doctor_torch.check_ranks, mend=doctor_torch.INSTALL)
    if config is not None:
        yield from attempt("config", str(config), functools.partial(_check_config, config))


def _check_config(file: Path) -> Iterator[Finding]:
    # Here: the engine imports torch, and without it the other checks shall still be made.
    from lamina.bench.doctor.config import check_config

    return check_config(file)


def _workplace(paths: Sequence[Path]) -> Path:
    """Where the backends are tried: the first path that can be written, else the folder for temporary files."""
    for path in paths:
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
            return path
    return Path(tempfile.gettempdir())


NARROW = 64
"""Columns; on a narrower terminal the texts begin under the names and not beside them."""
MARKS = {State.OK: "  ok", State.INFO: "  --", State.WARN: "WARN", State.FAIL: "FAIL"}


def render(findings: Sequence[Finding], width: int) -> Iterator[str]:
    """The report as lines of at most `width` characters where words allow."""
    wide = width >= NARROW
    names = max((len(finding.name) for finding in findings if wide and len(finding.name) <= 20), default=0)
    section = name = ""
    for finding in findings:
        if finding.section != section:
            section, name = finding.section, ""
            yield section
        shown = "" if finding.name == name else finding.name
        name = finding.name
        told = len(shown) > names  # a long name has a line of its own, with the mark
        if told:
            yield f"  {MARKS[finding.state]}  {shown}"
            shown = ""
        indent = " " * (names + 8)
        mark = " " * 4 if told else MARKS[finding.state]
        yield from _wrapped(f"  {mark}  {shown:{names}}", finding.text, indent, width)
        if finding.mend:
            yield f"{indent}  mend: {finding.mend}"  # in one line, to be copied
    failures = sum(finding.state is State.FAIL for finding in findings)
    warned = sum(finding.state is State.WARN for finding in findings)
    yield ""
    if failures or warned:
        yield f"{_count(failures, 'problem')}, {_count(warned, 'warning')}"
    else:
        yield "all is well"


def _wrapped(head: str, text: str, indent: str, width: int) -> list[str]:
    """`head` and `text`, folded under `indent`, never inside a word."""
    return textwrap.wrap(
        f"{head} {text}",
        width=max(40, width),
        subsequent_indent=f"{indent} ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=True,
        expand_tabs=False,
    ) or [head]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

"""The options of `lamina nvme`."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.bench.given_path import folder_argument

from .points import KIB, MIB, Workload

GIB = 1 << 30
BLOCKS = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
FILES = (1, 2, 4)
EXTRAS = ("memory", "device", "allgather")
DEFAULT_SIZE = 2 * GIB
LEAST_SIZE = 64 * KIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    paths: tuple[Path, ...]
    seconds: float
    size_bytes: int
    """Of all files on one path."""
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    files: tuple[int, ...]
    backends: tuple[str, ...] | None
    """None: all that work here."""
    workloads: tuple[Workload, ...]
    read_share: float
    processes: int
    buffer_bytes: int | None
    huge_pages: bool | None
    """False: small pages. None: huge where they can be had."""
    direct: bool | None
    """False: through the page cache. None: direct where it can be had."""
    extras: tuple[str, ...]
    extras_given: bool
    """The extras were named on the command line."""
    fio: bool
    json: bool
    plot: Path | None
    save: bool
    save_as: Path | None
    grid: bool


def parse_size(text: str) -> int:
    """Bytes from 4096, 64K, 1M, 1MiB (powers of 1024) or 1MB, 2GB (powers of 1000). Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write for example 64K, 1MiB or 2GB")
    number, prefix, unit = match.groups()
    base = 1000 if (unit or "").lower() == "b" else 1024
    nbytes = float(number) * base ** (" KMGT".index(prefix.upper()) if prefix else 0)
    if nbytes != int(nbytes) or nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {nbytes:g} bytes: must be a whole number of at least 1")
    return int(nbytes)


def _sizes(text: str) -> tuple[int, ...]:
    values = tuple(sorted({parse_size(part) for part in text.split(",")}))
    for value in values:
        if value % 4096:
            raise argparse.ArgumentTypeError(f"{value} is no multiple of 4096: direct I/O needs one")
    return values


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _count(text: str) -> int:
    if not text.strip().isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number from 1 to 1024")
    return int(text)


def _choice_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        values = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for value in values:
            if value not in known:
                raise argparse.ArgumentTypeError(f"{value!r}: want one or more of {', '.join(known)}")
        return values

    return parse


def _extras(text: str) -> tuple[str, ...]:
    return () if text.strip() == "none" else _choice_of(EXTRAS)(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: want seconds from 0.1 to 86400")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 0.99:
        raise argparse.ArgumentTypeError(f"{text!r}: want the share of reads in the mix, from 0.01 to 0.99")
    return value


def parser() -> argparse.ArgumentParser:
    """The parser; its help is the manual."""
    make = argparse.ArgumentParser(
        prog="lamina nvme",
        description="Measure how fast files on PATH can be read and written, and find the settings that reach it.",
        allow_abbrev=False,
        epilog="Works on files of its own in a private folder inside PATH and removes them, also on Ctrl-C. "
        "It writes as fast as it can for about a third of the time: see --seconds and the bytes reported.",
    )
    make.add_argument(
        "paths", nargs="+", type=folder_argument, metavar="PATH", help="folder on the disk; several: also together"
    )
    make.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="time for the whole run (60); it ends by then, but not before 20 s if parts need as long",
    )
    make.add_argument(
        "--size", type=parse_size, default=DEFAULT_SIZE, metavar="SIZE", help="of all files on a path (2GiB)"
    )
    what = make.add_argument_group("what is tried")
    what.add_argument("--block-sizes", type=_sizes, default=BLOCKS, metavar="LIST", help="64K,256K,1M,2M,4M,8M")
    what.add_argument("--queue-depths", type=_counts, default=DEPTHS, metavar="LIST", help="1,2,4,8,16,32,64")
    what.add_argument("--files", type=_counts, default=FILES, metavar="LIST", help="numbers of files (1,2,4)")
    what.add_argument(
        "--backends", type=_choice_of(("uring", "threads")), metavar="LIST", help="uring,threads (all that work)"
    )
    what.add_argument(
        "--workloads",
        type=_choice_of(tuple(Workload)),
        default=tuple(Workload),
        metavar="LIST",
        help="read,write,mix",
    )
    what.add_argument("--read-share", type=_share, default=0.5, metavar="X", help="bytes read in the mix (0.5)")
    what.add_argument("--processes", type=_count, default=1, metavar="N", help="also measure N processes at once")
    memory = make.add_argument_group("how")
    memory.add_argument(
        "--buffer", type=parse_size, metavar="SIZE", help="memory of a process for transfers (at most 128MiB)"
    )
    memory.add_argument("--small-pages", action="store_true", help="4 KiB pages, to see what they cost")
    memory.add_argument("--buffered", action="store_true", help="through the page cache instead of direct I/O")
    also = make.add_argument_group("what else")
    also.add_argument("--extras", type=_extras, metavar="LIST", help="memory,device,allgather or none (all)")
    also.add_argument("--fio", action="store_true", help="compare with fio over the same points, in the same run")
    output = make.add_argument_group("output")
    output.add_argument("--grid", action="store_true", help="print the rate of every point")
    output.add_argument("--json", action="store_true", help="one JSON line on stdout, the report on stderr")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of all points")
    output.add_argument("--save", action="store_true", help="keep a profile in the user's cache for plan and train")
    output.add_argument("--save-as", type=Path, metavar="FILE", help="write the profile to FILE instead")
    return make


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line. SystemExit as argparse does, ValueError for what does not fit together."""
    given = parser().parse_args(arguments)
    if given.size < LEAST_SIZE:
        raise ValueError(f"--size {given.size}: must be at least {LEAST_SIZE}")
    # A folder that is named twice, by way of a link too, is measured once.
    paths = tuple({os.path.realpath(path): path.absolute() for path in reversed(given.paths)}.values())[::-1]
    return Options(
        paths=paths,
        seconds=given.seconds,
        size_bytes=given.size,
        blocks=given.block_sizes,
        depths=given.queue_depths,
        files=given.files,
        backends=given.backends,
        workloads=tuple(Workload(name) for name in given.workloads),
        read_share=given.read_share,
        processes=given.processes,
        buffer_bytes=given.buffer,
        huge_pages=False if given.small_pages else None,
        direct=False if given.buffered else None,
        extras=EXTRAS if given.extras is None else given.extras,
        extras_given=given.extras is not None,
        fio=given.fio,
        json=given.json,
        plot=given.plot,
        save=given.save or given.save_as is not None,
        save_as=given.save_as,
        grid=given.grid,
    )

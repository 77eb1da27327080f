"""`lamina timeline TRACE… --png FILE`: a step of each trace in lanes of time, real and simulated ones on one axis.

lamina train --trace run.json … ; lamina plan … --timeline plan.png ; lamina timeline run.json plan.json --png both.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lamina.bench.report import Reporter, format_seconds
from lamina.bench.timeline import draw, in_order, read_step, require_drawable


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    make = argparse.ArgumentParser(
        prog="lamina timeline", description="Draw a step of each trace, one above the other."
    )
    make.add_argument("trace", nargs="+", type=Path, help="of lamina train --trace, or of lamina plan --timeline")
    make.add_argument("--png", type=Path, metavar="FILE", help="where to draw them; without it, only the table")
    make.add_argument("--step", type=int, metavar="N", help="number of the step (the one of median length)")
    make.add_argument("--json", action="store_true", help="one line of JSON on stdout, the table on stderr")
    return make.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run `lamina timeline ARGUMENTS...`; returns the exit code. Errors go to the caller."""
    given = parse(arguments)
    report = Reporter(as_json=given.json)
    if given.png is not None:
        require_drawable(given.png)
    pictures = [read_step(path, step=given.step) for path in given.trace]
    lanes = in_order(lane for picture in pictures for lane in picture.lanes)
    for path, picture in zip(given.trace, pictures, strict=True):
        report.line(f"{path}: {picture.title}")
    rows = [[lane, *(format_seconds(picture.busy_s(lane)) for picture in pictures)] for lane in lanes]
    rows.append(["step", *(format_seconds(picture.step_s) for picture in pictures)])
    report.table("Seconds in which each lane was busy", ["lane", *(path.name for path in given.trace)], rows)
    if given.png is not None:
        draw(pictures, given.png)
        report.line(f"timeline written to {given.png}")
    report.json(
        {
            "picture": str(given.png) if given.png is not None else None,
            "traces": [
                {
                    "file": str(path),
                    "title": picture.title,
                    "step_s": picture.step_s,
                    "busy_s": {lane: picture.busy_s(lane) for lane in lanes},
                }
                for path, picture in zip(given.trace, pictures, strict=True)
            ],
        }
    )
    return 0

"""Step time against peak memory: `python -m lamina.bench frontier`.

The same GPT, data and start in lamina under several budgets, in plain PyTorch and, with --peer-python, in DeepSpeed:
bf16, no clipping, one process per run, rounds alternating, medians. Memory is a process's peak above importing torch.
"""

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lamina.bench.frontier.modes import ADAM, PASSES_LIMIT, START_LIMIT_S, WANTED, Mode, lamina_modes, peer_modes
from lamina.bench.frontier.plot import Point, draw
from lamina.bench.report import Reporter, format_bytes, format_seconds
from lamina.bench.training import gpt
from lamina.bench.training.gpt import GPTShape

SIZES = {
    "14M": (GPTShape(layers=8, dim=384, heads=6, seq=128), 2),
    "98M": (GPTShape(layers=14, dim=768, heads=12, seq=128), 2),
    "336M": (GPTShape(layers=27, dim=1024, heads=16, seq=128), 1),
    "990M": (GPTShape(layers=20, dim=2048, heads=32, seq=64), 1),
    "toy": (GPTShape(layers=3, dim=128, heads=4, seq=32), 2),
}
"""Shape and micro-batch."""
SMALL = ("14M", "toy")
"""Sizes whose start-up is judged: larger ones write gigabytes first."""
BUDGETS = ((0.35, 1.6), (0.35, 2.5), (0.7, 4.0), (1.0, 8.0), (2.0, 12.0))
"""(device, host) bytes per parameter."""
LOSS_TOLERANCE = 0.03
"""Largest difference of a loss in nats from plain PyTorch's that bf16 rounding may make over a few steps."""
COMPARED_STEPS = 6
"""So many from the start: what rounding makes of a loss grows with every step, on its peaks above all."""


@dataclass(kw_only=True)
class Runs:
    """All runs of one mode."""

    mode: Mode
    results: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def refused(self) -> bool:
        """Whether the budgets were too small, which lamina says before it starts."""
        return "PlacementError" in self.error

    def mid(self, name: str) -> float:
        """Median over the rounds; 0 where nothing was measured."""
        return float(median(result[name] for result in self.results)) if self.results else 0.0

    def loss_gap(self, reference: "Runs | None") -> float | None:
        """Largest difference from the reference's first losses; None where either is missing."""
        if reference is None or not self.results or not reference.results:
            return None
        pairs = zip(self.results[0]["losses"], reference.results[0]["losses"], strict=True)
        return max(abs(float(ours) - float(theirs)) for ours, theirs in itertools.islice(pairs, COMPARED_STEPS))


def run(mode: Mode, job: dict[str, Any], python: str, *, timeout_s: float) -> dict[str, Any]:
    """One process; raises RuntimeError with the last line that it said when it fails."""
    script = str(Path(__file__).with_name("run.py"))
    job = job | {"system": mode.system, "config": mode.config, "port": _free_port()}
    try:
        child = subprocess.run(
            [python, script, json.dumps(job)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {timeout_s:.0f} s") from None
    told = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        said = [line for line in child.stderr.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
        raise RuntimeError(said[-1])
    result: dict[str, Any] = json.loads(told[-1].removeprefix("RESULT "))
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_size(size: str, options: argparse.Namespace, report: Reporter) -> list[Runs]:
    """All modes of one size, round by round."""
    shape, micro_batch = SIZES[size]
    job = {
        "shape": {name: getattr(shape, name) for name in ("layers", "dim", "heads", "seq", "tied")},
        "micro_batch": micro_batch,
        "gpt_file": str(Path(gpt.__file__).resolve()),
        "adam": ADAM,
        "warm_up": options.warm_up,
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory(prefix="lamina-frontier-", dir=options.nvme_path) as folder:
        modes = [Mode(system="torch", name="in memory")]
        modes += lamina_modes(shape.num_params, micro_batch, os.path.abspath(folder), options.budgets)
        if options.peer_python:
            modes += peer_modes(micro_batch, os.path.abspath(folder))
        runs = [Runs(mode=mode) for mode in modes if re.search(options.only, mode.label)]
        if not runs:
            raise ValueError(f"--only {options.only!r}: no run matches; a label is {modes[0].label!r}")
        total = len(runs) * options.rounds
        with report.progress(total, title=size, plain_lines=total) as progress:
            for _ in range(options.rounds):
                for item in runs:
                    _once_more(item, job, options)
                    progress.advance(f"{item.mode.label}: {item.error or format_seconds(item.mid('step_s'))}")
    return runs


def _once_more(item: Runs, job: dict[str, Any], options: argparse.Namespace) -> None:
    """Another run, unless the mode has failed before."""
    if item.error:
        return
    python = options.peer_python if item.mode.system == "deepspeed" else sys.executable
    try:
        item.results.append(run(item.mode, job, python, timeout_s=options.timeout))
    except (RuntimeError, OSError) as error:
        item.error = str(error)[:300]


def verdicts(runs: Sequence[Runs], *, small: bool = False) -> list[dict[str, Any]]:
    """What is wanted and what is there: the fastest of lamina's runs within each share of a peer's memory. ``small``: how long
    it takes to start is of interest, too."""
    found = []
    ours = [item for item in runs if item.mode.system == "lamina" and item.results]
    peers = {item.mode.name: item for item in runs if item.mode.system == "deepspeed" and item.results}
    for wanted in WANTED:
        peer = peers.get(wanted.peer)
        if peer is None:
            continue
        limit = wanted.memory * peer.mid("peak_bytes")
        within = [item for item in ours if item.mid("peak_bytes") <= limit]
        best = min(within, key=lambda item: item.mid("step_s"), default=None)
        speed = peer.mid("step_s") / best.mid("step_s") if best is not None else 0.0
        found.append(
            {
                "wanted": str(wanted),
                "speed": speed,
                "by": best.mode.name if best is not None else None,
                "holds": speed >= wanted.speed,
            }
        )
    return found + _passes_verdict(runs) + (_start_verdict(runs) if small else [])


def _passes_verdict(runs: Sequence[Runs]) -> list[dict[str, Any]]:
    by_label = {item.mode.label: item for item in runs if item.results}
    plain, ours = by_label.get("torch in memory"), by_label.get("lamina in memory")
    if plain is None or ours is None:
        return []
    ratio = (ours.mid("forward_s") + ours.mid("backward_s")) / (plain.mid("forward_s") + plain.mid("backward_s"))
    wanted = f"forward and backward with nothing to fetch at most {PASSES_LIMIT:g} x plain PyTorch's"
    return [{"wanted": wanted, "ratio": ratio, "by": "in memory", "holds": ratio <= PASSES_LIMIT}]


def _start_verdict(runs: Sequence[Runs]) -> list[dict[str, Any]]:
    """The slowest of lamina's runs counts."""
    plain, name = _reference(runs), "first_step_at_s"
    ours = [item for item in runs if item.mode.system == "lamina" and item.results]
    if plain is None or not plain.results or not ours:
        return []
    slowest = max(ours, key=lambda item: item.mid(name))
    over = slowest.mid(name) - plain.mid(name)
    wanted = f"start to the end of the first step at most {START_LIMIT_S:g} s over plain PyTorch's"
    return [{"wanted": wanted, "ratio": over, "by": slowest.mode.name, "holds": over <= START_LIMIT_S}]


def show(report: Reporter, size: str, runs: Sequence[Runs]) -> None:
    """One size's table and its verdicts."""
    reference = _reference(runs)
    rows = []
    for item in runs:
        if item.error:
            rows.append([item.mode.label, "refused:" if item.refused else "failed:", item.error[:70], *[""] * 6])
            continue
        gap = item.loss_gap(reference)
        bound = item.mid("lower_bound_s") if item.mode.system == "lamina" else 0.0
        rows.append(
            [
                item.mode.label,
                *(format_seconds(item.mid(name)) for name in ("forward_s", "backward_s", "update_s", "step_s")),
                format_bytes(item.mid("peak_bytes")),
                "" if gap is None else f"{gap:.4f}" + ("" if gap <= LOSS_TOLERANCE else " !"),
                f"{item.mid('step_s') / bound:.2f}" if bound else "",
                format_seconds(item.mid("first_step_at_s")),
            ]
        )
    columns = ["run", "forward", "backward", "update", "step", "peak memory", "loss gap", "over bound", "start-up"]
    report.table(f"{size}: step time and memory, medians", columns, rows)
    for verdict in verdicts(runs, small=size in SMALL):
        figure = verdict.get("speed", verdict.get("ratio", 0.0))
        report.line(f"{'holds' if verdict['holds'] else 'does not hold'} ({figure:.2f}): {verdict['wanted']}")
    report.line()


def points_of(runs: Sequence[Runs]) -> list[Point]:
    """What the picture shows: every run that has a result."""
    return [
        Point(
            system=item.mode.system, name=item.mode.name, peak_bytes=item.mid("peak_bytes"), step_s=item.mid("step_s")
        )
        for item in runs
        if item.results
    ]


def _reference(runs: Sequence[Runs]) -> Runs | None:
    return next((item for item in runs if item.mode.system == "torch"), None)


def _budgets(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [pair.split("+") for pair in text.split(",") if pair]
        found = tuple((float(device), float(host)) for device, host in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: want DEVICE+HOST bytes per parameter, such as 0.35+2,1+8"
        ) from None
    if any(value <= 0 for pair in found for value in pair):
        raise argparse.ArgumentTypeError(f"{text!r}: budgets must be positive")
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lamina frontier", description=__doc__)
    parser.add_argument("--nvme-path", default=".", help="folder on the disk to be used (default: here)")
    parser.add_argument("--sizes", default="98M", help=f"of {', '.join(SIZES)}, with commas between (default 98M)")
    parser.add_argument("--budgets", type=_budgets, default=BUDGETS, help="DEVICE+HOST bytes per parameter, ...")
    parser.add_argument("--peer-python", help="an interpreter that has DeepSpeed; without it, it is left out")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of everything (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run (default 6)")
    parser.add_argument(
        "--warm-up", type=int, default=8, help="steps before them, in which state finds its place (default 8)"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run (default 900)")
    parser.add_argument("--only", default="", help="regular expression for the runs to do")
    parser.add_argument("--png", help="draw the frontier into this file (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout, the tables on stderr")
    options = parser.parse_args(argv)
    unknown = [size for size in options.sizes.split(",") if size not in SIZES]
    if unknown:
        parser.error(f"--sizes {unknown[0]}: there are {', '.join(SIZES)}")
    if min(options.rounds, options.steps) < 1 or options.warm_up < 0:
        parser.error("--rounds and --steps must be at least 1, --warm-up at least 0")
    if not os.path.isdir(options.nvme_path):
        parser.error(f"--nvme-path {options.nvme_path}: not a folder")
    return options


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when every run succeeded and losses agree; whether what is wanted holds is said, not judged.

    A budget that lamina refuses is an answer, not a failure.
    """
    options = parse(argv)
    report = Reporter(as_json=options.json)
    facts = report.machine()
    sizes: dict[str, list[Runs]] = {}
    for size in options.sizes.split(","):
        sizes[size] = measure_size(size, options, report)
        show(report, size, sizes[size])
    if options.png:
        draw(options.png, {size: points_of(runs) for size, runs in sizes.items()})
        report.line(f"drawn: {options.png}")
    report.json({"machine": facts, "sizes": {size: _as_dict(size, runs) for size, runs in sizes.items()}})
    return 0 if all(_sound(item, _reference(runs)) for runs in sizes.values() for item in runs) else 1


def _sound(item: Runs, reference: Runs | None) -> bool:
    gap = item.loss_gap(reference)
    return (not item.error or item.refused) and (gap is None or gap <= LOSS_TOLERANCE)


def _as_dict(size: str, runs: Sequence[Runs]) -> dict[str, Any]:
    reference = _reference(runs)
    return {
        "runs": [
            {
                "run": item.mode.label,
                "error": item.error,
                "loss_gap": item.loss_gap(reference),
                "config": item.mode.config,
                "results": item.results,
            }
            for item in runs
        ],
        "verdicts": verdicts(runs, small=size in SMALL),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

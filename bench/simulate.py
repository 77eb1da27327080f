"""Simulated steps against real ones: `python -m lamina.bench simulate`.

For every configuration the same model is first trained with everything in memory, which gives the seconds of compute and
of Adam; from these, the placement, and what the engine measured of its links in the first steps, the step is simulated and held
against those that are measured then.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from lamina.bench.report import Reporter, format_bytes, format_seconds
from lamina.bench.training.gpt import GPTShape

TOLERANCE = 0.15
TIMEOUT_S = 900
WARM_UP = 8
"""Steps until the engine knows its links from steps, and has moved what it wants to move."""
SMALL = GPTShape(layers=8, dim=512, heads=8, seq=128)
WIDE = GPTShape(layers=4, dim=1024, heads=16, seq=128)
DEEP = GPTShape(layers=14, dim=768, heads=12, seq=128)
TOY = GPTShape(layers=3, dim=128, heads=4, seq=32)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One configuration. ``device`` and ``host`` are budgets in bytes per parameter; 0 for none."""

    shape: GPTShape
    dtype: str = "bf16"
    param: str = "nvme"
    optimizer: str = "nvme"
    device: float = 0.0
    host: float = 0.0
    clip: float = 0.0
    micro_batch: int = 2
    accumulation: int = 1

    @property
    def label(self) -> str:
        """Short name for tables; `--only` matches it."""
        size = (
            f"{self.shape.num_params / 1e6:.0f}M"
            if self.shape.num_params >= 1e6
            else f"{self.shape.num_params / 1e3:.0f}k"
        )
        parts = [f"{size} {self.dtype}", f"param {self.param}, optimizer {self.optimizer}"]
        parts += [f"{self.device:g}+{self.host:g} B/param"] if self.device else []
        parts += ["clipped"] if self.clip else []
        parts += [f"x {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join(parts)

    def config(self, folder: str) -> dict[str, Any]:
        """As `initialize` takes it."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
            "tiers": {},
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        for key, device in (("offload_param", self.param), ("offload_optimizer", self.optimizer)):
            if device != "auto":
                config["zero_optimization"][key] = {"device": device}
        if "nvme" in (self.param, self.optimizer) or "auto" in (self.param, self.optimizer):
            config["tiers"]["nvme"] = [folder]
        if self.device:
            config["tiers"]["device_bytes"] = int(self.device * self.shape.num_params)
            config["tiers"]["host_bytes"] = int(self.host * self.shape.num_params)
        return config

    def in_memory(self) -> "Trial":
        """The same work with everything in memory."""
        return replace(self, param="none", optimizer="cpu", device=0.0, host=0.0)


def trials(shapes: Sequence[GPTShape]) -> Iterator[Trial]:
    """Sizes, tiers, budgets, precision, clipping, accumulation."""
    small, wide, deep = shapes
    yield Trial(shape=small)
    yield Trial(shape=small, clip=1.0)
    yield Trial(shape=small, param="none")
    yield Trial(shape=small, dtype="fp32")
    yield Trial(shape=small, accumulation=2)
    yield Trial(shape=small, param="auto", optimizer="auto", device=1.0, host=8.0)
    yield Trial(shape=wide)
    yield Trial(shape=wide, param="auto", optimizer="auto", device=1.5, host=10.0, clip=1.0)
    yield Trial(shape=deep)
    yield Trial(shape=deep, clip=1.0)
    yield Trial(shape=deep, param="auto", optimizer="auto", device=0.6, host=5.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One trial's simulated step beside its real one."""

    trial: Trial
    predicted_s: float
    measured_s: float
    predicted: dict[str, Any]
    measured: dict[str, Any]
    error: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured; 0 where the run failed."""
        return self.predicted_s / self.measured_s if self.measured_s else 0.0

    @property
    def holds(self) -> bool:
        """Within tolerance."""
        return not self.error and abs(self.ratio - 1) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "trial": self.trial.label,
            "shape": asdict(self.trial.shape),
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "ratio": self.ratio,
            "holds": self.holds,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
        }


def run_child(module: str, job: dict[str, Any], *, python: str = sys.executable) -> dict[str, Any]:
    """Run a probe in a process of its own; raises RuntimeError with the last line that it said when it fails."""
    command = [python, "-m", module, json.dumps(job)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if child.returncode != 0 or not child.stdout.strip():
        said = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise RuntimeError(said[-1])
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


def job_of(trial: Trial, folder: str, *, steps: int, times: dict[str, float] | None = None) -> dict[str, Any]:
    """What the probe is told."""
    return {
        "shape": {name: getattr(trial.shape, name) for name in ("layers", "dim", "heads", "seq", "tied")},
        "config": trial.config(folder),
        "micro_batch": trial.micro_batch,
        "warm_up": WARM_UP,
        "steps": steps,
        "times": times,
    }


def try_out(trial: Trial, folder: str, *, steps: int, rounds: int) -> Outcome:
    """Alternate runs in memory and under the trial's placement; medians of both. A failure becomes the outcome's error."""
    predicted, measured = [], []
    try:
        for _ in range(rounds):
            base = run_child(PROBE, job_of(trial.in_memory(), folder, steps=steps))
            times = {
                "forward_s": base["forward_s"],
                "backward_s": base["backward_s"],
                "adam_elements_per_s": base["trained"] / base["update_s"],
            }
            measured.append(run_child(PROBE, job_of(trial, folder, steps=steps, times=times)))
            predicted.append(measured[-1].pop("predicted"))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Outcome(trial=trial, predicted_s=0.0, measured_s=0.0, predicted={}, measured={}, error=str(error)[:300])
    middle = sorted(range(rounds), key=lambda index: measured[index]["step_s"])[rounds // 2]
    return Outcome(
        trial=trial,
        predicted_s=median(item["step_s"] for item in predicted),
        measured_s=median(item["step_s"] for item in measured),
        predicted=predicted[middle],
        measured=measured[middle],
    )


PROBE = "lamina.bench.simulate_probe"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lamina simulate", description=__doc__)
    parser.add_argument("--nvme-path", default=".", help="folder on the disk to be used (default: here)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each configuration (default 3)")
    parser.add_argument("--only", default="", help="regular expression for the labels of the configurations to run")
    parser.add_argument("--toy", action="store_true", help="tiny models: does everything, and says nothing about speed")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout, the table on stderr")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    if not os.path.isdir(options.nvme_path):
        parser.error(f"--nvme-path {options.nvme_path}: not a folder")
    return options


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when every configuration ran and is within tolerance (with --toy: when every one ran)."""
    options = parse(argv)
    shapes = [TOY, replace(TOY, dim=192), replace(TOY, layers=5)] if options.toy else [SMALL, WIDE, DEEP]
    chosen = [trial for trial in trials(shapes) if re.search(options.only, trial.label)]
    if not chosen:
        raise ValueError(
            f"--only {options.only!r}: no configuration matches; a label is {next(trials(shapes)).label!r}"
        )
    report = Reporter(as_json=options.json)
    facts = report.machine()
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="lamina-simulate-", dir=options.nvme_path) as folder,
        report.progress(len(chosen), title="simulate", plain_lines=len(chosen)) as progress,
    ):
        for trial in chosen:
            outcomes.append(try_out(trial, os.path.abspath(folder), steps=options.steps, rounds=options.rounds))
            progress.advance(f"{trial.label}: {outcomes[-1].error or format(outcomes[-1].ratio, '.2f')}")
    show(report, outcomes)
    report.json({"machine": facts, "tolerance": TOLERANCE, "trials": [outcome.as_dict() for outcome in outcomes]})
    return 0 if all(not outcome.error if options.toy else outcome.holds for outcome in outcomes) else 1


def show(report: Reporter, outcomes: Sequence[Outcome]) -> None:
    """The table and its sum."""
    rows = []
    for outcome in outcomes:
        if outcome.error:
            rows.append([outcome.trial.label, "failed:", outcome.error[:60], "", "", "", "", ""])
            continue
        told, real = outcome.predicted, outcome.measured
        rows.append(
            [
                outcome.trial.label,
                format_seconds(outcome.predicted_s),
                format_seconds(outcome.measured_s),
                f"{outcome.ratio:.2f}",
                f"{format_bytes(told['read_bytes'])} / {format_bytes(real['read_bytes'])}",
                f"{format_bytes(told['written_bytes'])} / {format_bytes(real['written_bytes'])}",
                f"{told['ratio']:.2f}",
                told["binding"],
            ]
        )
    columns = ["configuration", "predicted", "measured", "ratio", "read", "written", "over bound", "binds"]
    report.table("A step, simulated and measured (bytes: simulated / measured)", columns, rows)
    good = sum(outcome.holds for outcome in outcomes)
    report.line(f"{good} of {len(outcomes)} within {TOLERANCE:.0%}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Predictions of the planner against measured runs on this machine: the table of `python -m lamina.bench
plan`.

Every configuration is planned, its config is emitted and trained in a process of its own at its own budget.
The arenas' own peaks, the growth of resident memory and the step time are held against the plan.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lamina.bench.report import Reporter
from lamina.bench.training.gpt import GPT, GPTShape
from lamina.engine.planner import (
    Buffers,
    Machine,
    Option,
    Phase,
    Placement,
    PlanError,
    Question,
    Workload,
    emit_config,
    shape_from_module,
    this_machine,
)
from lamina.engine.planner.options import option
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.quantity import format_bytes, format_seconds
from lamina.engine.planner.state_bytes import as_dtype

BYTES_TOLERANCE, RSS_TOLERANCE, TIME_TOLERANCE = 0.03, 0.10, 0.20
ENGINE_BYTES, FILE_IO_BYTES = 24 << 20, 10 << 20
"""What an engine takes beyond its arenas in a process that has torch: kernels, bookkeeping and torch's workspaces for products
of this size (14 MiB measured), and what the C library's heap does not give back; with state on nvme the ring, I/O threads and
checksums."""
NOMINAL_RATES = {
    **dict.fromkeys(("half_flops", "fp32_flops"), 1e11),
    **dict.fromkeys(("host_bandwidth", "nvme_read_bandwidth", "nvme_write_bandwidth"), 1e9),
}
"""For bytes, which no rate changes."""
STEPS = 4
TIMEOUT_S = 300
SHAPE = GPTShape(layers=8, dim=512, heads=8, seq=256)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One configuration to be planned and trained."""

    dtype: str = "bf16"
    stage: int = 3
    param: str = NVME
    optimizer: str = NVME
    ranks: int = 1
    checkpointing: bool = False
    micro_batch: int = 2
    accumulation: int = 1
    shape: GPTShape = SHAPE

    @property
    def label(self) -> str:
        """Short name for tables."""
        place = self.placement.label
        parts = [self.dtype, place, f"{self.micro_batch} x {self.shape.seq}"]
        parts += [f"x {self.accumulation}"] if self.accumulation > 1 else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        parts += [f"{self.shape.layers} x {self.shape.dim}"] if self.shape is not SHAPE else []
        return ", ".join(parts)

    @property
    def placement(self) -> Placement:
        """Where its state lives."""
        return Placement(stage=self.stage, param=self.param, optimizer=self.optimizer)

    @property
    def load(self) -> Workload:
        """What it computes."""
        return Workload(
            micro_batch=self.micro_batch,
            sequence=self.shape.seq,
            accumulation=self.accumulation,
            dtype=as_dtype(self.dtype),
            checkpoint_interval=1 if self.checkpointing else 0,
        )


def trials() -> Iterator[Trial]:
    """Stages, tiers, dtypes, ranks, checkpointing, accumulation and sizes."""
    for dtype in ("bf16", "fp32"):
        for checkpointing in (False, True):
            yield Trial(dtype=dtype, checkpointing=checkpointing)
            yield Trial(dtype=dtype, checkpointing=checkpointing, param=DEVICE, optimizer=HOST)
        yield Trial(dtype=dtype, param=HOST, optimizer=HOST)
        yield Trial(dtype=dtype, param=DEVICE, optimizer=NVME)
        yield Trial(dtype=dtype, accumulation=3)
        yield Trial(dtype=dtype, param=DEVICE, optimizer=HOST, accumulation=3)
        yield Trial(dtype=dtype, micro_batch=8)
    yield Trial(stage=1, param=DEVICE, optimizer=HOST)
    yield Trial(stage=2, param=DEVICE, optimizer=NVME)
    yield Trial(shape=GPTShape(layers=14, dim=768, heads=12, seq=128))
    yield Trial(shape=GPTShape(layers=3, dim=1024, heads=8, seq=128), checkpointing=True)
    yield Trial(param=DEVICE, optimizer=HOST, ranks=2)
    yield Trial(ranks=2)


def few_trials() -> Iterator[Trial]:
    """A sample that takes seconds."""
    small = GPTShape(layers=4, dim=256, heads=4, seq=128)
    yield Trial(shape=small)
    yield Trial(shape=small, dtype="fp32", param=DEVICE, optimizer=HOST, checkpointing=True)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One trial's prediction beside its measurement."""

    trial: Trial
    predicted: dict[str, int]
    """Arena bytes by tier."""
    measured: dict[str, int]
    rss: tuple[int, int]
    """Growth of resident memory of one rank, predicted and measured."""
    step_s: tuple[float, float]
    passes_s: tuple[float, float] = (0.0, 0.0)
    """The part of it that is forward and backward."""
    error: str = ""

    @property
    def worst_bytes(self) -> float:
        """Largest relative error over tiers."""
        errors = [
            abs(self.predicted[tier] - self.measured.get(tier, 0)) / max(self.measured.get(tier, 0), 1)
            for tier in self.predicted
            if self.predicted[tier] or self.measured.get(tier, 0)
        ]
        return max(errors, default=0.0)

    @property
    def holds(self) -> bool:
        """All three are within tolerance."""
        if self.error:
            return False
        return (
            self.worst_bytes <= BYTES_TOLERANCE
            and abs(self.rss[0] / self.rss[1] - 1) <= RSS_TOLERANCE
            and abs(self.step_s[0] / self.step_s[1] - 1) <= TIME_TOLERANCE
        )


def check(report: Reporter, *, nvme_path: str | None = None, quick: bool = False, only: str | None = None) -> int:
    """Run the trials, with `only` those whose label matches; returns 0 when every prediction is within
    tolerance."""
    chosen = [trial for trial in (few_trials() if quick else trials()) if re.search(only or "", trial.label)]
    if not chosen:
        raise PlanError(f"--only {only!r}: no configuration matches; labels are such as {Trial().label!r}")
    report.machine()
    with tempfile.TemporaryDirectory(prefix="lamina-plan-", dir=nvme_path or ".") as folder:
        verdicts = []
        with report.progress(len(chosen), title="training") as progress:
            for trial in chosen:
                verdicts.append(try_out(trial, Path(folder)))
                progress.advance(f"{trial.label}: {'holds' if verdicts[-1].holds else 'does not hold'}")
    print_verdicts(report, verdicts)
    report.json({"trials": [verdict_data(verdict) for verdict in verdicts]})
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def host_rates(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Fields of the planner's machine from what its ranks reached at once: they share cores, memory and disk."""
    each = ("achievable", "peer_bandwidth")
    return {
        name: min(rates[name] for rates in of_ranks) if name in each else sum(rates[name] for rates in of_ranks)
        for name in of_ranks[0]
    }


def machine_for(trial: Trial, folder: Path, rates: dict[str, float]) -> Machine:
    """This machine with such rates."""
    own = ENGINE_BYTES + (FILE_IO_BYTES if NVME in (trial.param, trial.optimizer) else 0)
    return replace(this_machine(rates=rates, nvme_path=folder, ranks=trial.ranks), process_bytes=own)


def planned(trial: Trial, folder: Path, rates: dict[str, float]) -> Option:
    """The planner's view of a trial."""
    with torch.device("meta"):
        model = shape_from_module(GPT(trial.shape), name="gpt", heads=trial.shape.heads)
    question = Question(
        model=model,
        load=trial.load,
        machine=machine_for(trial, folder, rates),
        buffers=Buffers(zero_init=False, io_staging_bytes=0),
    )
    return option(question, trial.placement)


def try_out(trial: Trial, folder: Path) -> Verdict:
    """Plan, emit, train, compare. Bytes are planned before the run; seconds by the rates that were measured between its steps."""
    item = planned(trial, folder, NOMINAL_RATES)
    job = {
        "shape": {name: getattr(trial.shape, name) for name in ("layers", "dim", "heads", "seq", "tied")},
        "config": emit_config(item, nvme_path=str(folder)),
        "micro_batch": trial.micro_batch,
        "sequence": trial.shape.seq,
        "accumulation": trial.accumulation,
        "steps": STEPS,
    }
    predicted = {tier: item.held.arena_peak(tier) for tier in (DEVICE, HOST)}
    predicted[NVME] = item.held.peak(NVME)
    results, error = run_ranks(job, trial.ranks)
    if error:
        return Verdict(trial=trial, predicted=predicted, measured={}, rss=(0, 1), step_s=(0.0, 1.0), error=error)
    time = planned(trial, folder, host_rates([result["rates"] for result in results])).time
    measured = {tier: max(result["peak_bytes"].get(tier, 0) for result in results) for tier in predicted}
    return Verdict(
        trial=trial,
        predicted=predicted,
        measured=measured,
        rss=(resident(item), max(result["rss_growth"] for result in results)),
        step_s=(time.step_s, max(result["step_s"] for result in results)),
        passes_s=(time.passes_s, max(result["passes_s"] for result in results)),
    )


def resident(item: Option) -> int:
    """Bytes of one process at its peak: without a GPU both memory tiers are this process's."""
    return max(sum(item.held.resident((DEVICE, HOST), phase).values()) for phase in Phase)


def run_ranks(job: dict[str, Any], ranks: int) -> tuple[list[dict[str, Any]], str]:
    """Results of all ranks, or what the first failing one said."""
    command = [sys.executable, "-m", "lamina.bench.planner.probe", json.dumps(job)]
    port = _free_port()
    children: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            children.append(_start(command, rank, ranks, port))  # noqa: PERF401 - ended below, however far this came
        return _collect(children)
    finally:  # a stop leaves no process behind that still writes into the folder
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()


def _start(command: Sequence[str], rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
    """The process of one rank."""
    threads = str(max(len(os.sched_getaffinity(0)) // ranks, 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    if ranks > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _collect(children: Sequence[subprocess.Popen[str]]) -> tuple[list[dict[str, Any]], str]:
    results, error = [], ""
    for child in children:
        try:
            out, err = child.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            err += f"\nno result within {TIMEOUT_S} s"
        if child.returncode == 0 and out.strip():
            results.append(json.loads(out.splitlines()[-1]))
        elif not error:
            error = err.strip().splitlines()[-1] if err.strip() else f"exit code {child.returncode}"
    return results, error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_verdicts(report: Reporter, verdicts: Sequence[Verdict]) -> None:
    """The table, and one line of sums."""
    rows = []
    for verdict in verdicts:
        if verdict.error:
            rows.append([verdict.trial.label, "", "", "", "", "", f"failed: {verdict.error[:90]}"])
            continue
        tiers = [
            f"{format_bytes(verdict.predicted[tier])} / {format_bytes(verdict.measured[tier])}"
            for tier in (DEVICE, HOST, NVME)
        ]
        rss = f"{format_bytes(verdict.rss[0])} / {format_bytes(verdict.rss[1])} ({verdict.rss[0] / verdict.rss[1]:.2f})"
        ours, real = verdict.step_s
        time = f"{format_seconds(ours)} / {format_seconds(real)} ({ours / real:.2f})"
        rows.append([verdict.trial.label, *tiers, rss, time, "yes" if verdict.holds else "no"])
    columns = ["configuration", "device", "host", "nvme", "resident growth", "step", "holds"]
    report.table("Predicted / measured", columns, rows)
    done = [verdict for verdict in verdicts if not verdict.error]
    if done:
        worst = max(done, key=lambda verdict: verdict.worst_bytes)
        report.line(f"Largest error of arena bytes: {worst.worst_bytes:.2%} ({worst.trial.label})")
    good = sum(verdict.holds for verdict in verdicts)
    report.line(
        f"{good} of {len(verdicts)} hold: arena bytes within {BYTES_TOLERANCE:.0%}, resident memory within "
        f"{RSS_TOLERANCE:.0%}, step time within {TIME_TOLERANCE:.0%}."
    )


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """One trial as plain data."""
    return {
        "trial": verdict.trial.label,
        "predicted_bytes": verdict.predicted,
        "measured_bytes": verdict.measured,
        "resident_growth": list(verdict.rss),
        "step_s": list(verdict.step_s),
        "passes_s": list(verdict.passes_s),
        "holds": verdict.holds,
        "error": verdict.error,
    }

"""One training run in a process of its own, for `check`: measured bytes and seconds as one line of JSON.

    python -m lamina.bench.planner.probe '{"shape": {...}, "config": {...}, ...}'

Started by hand it takes the job as its argument; under a launcher RANK and WORLD_SIZE tell which rank it is.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lamina.aio_native import AsyncIO
from lamina.bench.planner.rates import exchange_rate, quick_rates, training_flops
from lamina.bench.report import process_memory
from lamina.bench.training.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine import initialize
from lamina.tiers.links.probe import probe_disk

WARM_UP = 2
ROUNDS = 2


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps; peaks of the arenas by tier, growth of resident memory, median seconds of a step, and what this machine
    does meanwhile: rates are measured in turn with steps, since those of a shared machine drift."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (job["micro_batch"], job["sequence"]))
    _warm_up(job)
    before = process_memory()["rss"]
    _forget_peak()
    model = GPT(GPTShape(**job["shape"]))
    engine, _, _, _ = initialize(model=model, config=job["config"])
    clock = _Clock()
    with engine:
        plan = str(engine.plan)
        for _ in range(WARM_UP + job["steps"]):
            clock.step(engine, tokens, job["accumulation"])
        growth = process_memory()["peak_rss"] + _huge_bytes() - before
        rates = [_rates(job)]
        for _ in range(ROUNDS):
            for index in range(1 + job["steps"]):  # what is read ahead of the first one had longer for it
                clock.step(engine, tokens, job["accumulation"], counts=index > 0)
            rates.append(_rates(job))
        metrics = engine.metrics()
    if world > 1:
        torch.distributed.destroy_process_group()
    return {
        "rank": rank,
        "peak_bytes": {str(tier): nbytes for tier, nbytes in metrics.peak_bytes.items()},
        "rss_growth": growth,
        "step_s": median(clock.seconds),
        "passes_s": median(clock.passes),
        "rates": {name: median(found[name] for found in rates) for name in rates[0]},
        "plan": plan,
    }


@dataclass(kw_only=True)
class _Clock:
    """Seconds of steps, and of the forward and backward passes in them."""

    seconds: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)

    def step(self, engine: Any, tokens: torch.Tensor, accumulation: int, *, counts: bool = False) -> None:
        began = time.perf_counter()
        for _ in range(accumulation):
            engine.backward(engine(tokens, tokens))
            engine.step()
        if counts:
            self.seconds.append(time.perf_counter() - began)
            self.passes.append(engine.metrics().forward_s + engine.metrics().backward_s)


def _rates(job: dict[str, Any]) -> dict[str, float]:
    """Fields of the planner's machine as they are now for this rank, while all ranks measure: memory, a small run of the job's
    dtype, width and batch, and what the job uses of the disk and between ranks."""
    shape = GPTShape(**job["shape"])
    dtype = "bf16" if job["config"].get("bf16") else "fp32"
    name = "half_flops" if dtype != "fp32" else "fp32_flops"
    _together()
    found = quick_rates()
    _together()
    found |= {name: training_flops(dtype, shape, micro_batch=job["micro_batch"]), "achievable": 1.0}
    for entry in job["config"]["tiers"].get("nvme", ()):
        _together()
        with AsyncIO() as io:
            speed = probe_disk(io, entry["path"])
        found |= {"nvme_read_bandwidth": speed.read, "nvme_write_bandwidth": speed.write}
    if torch.distributed.is_initialized():
        found["peer_bandwidth"] = exchange_rate(torch.bfloat16 if dtype == "bf16" else torch.float32)
    return found


def _together() -> None:
    """Ranks that measure at different times would each have the whole machine."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _warm_up(job: dict[str, Any]) -> None:
    """What torch loads and allocates once for itself in a first pass is not part of a run's growth."""
    small = GPTShape(layers=1, dim=64, heads=2, seq=16)
    model = GPT(small).to(torch.bfloat16 if job["config"].get("bf16") else torch.float32)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    # The first optimizer of a process imports torch's compiler: 70 MB, whatever is trained.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(tokens, tokens).backward()
    optimizer.step()


def _huge_bytes() -> int:
    """Bytes on reserved huge pages, which the kernel leaves out of resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("HugetlbPages:"):
            return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    """Start the kernel's count of peak resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)

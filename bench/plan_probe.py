"""One training run in a process of its own, for `plan_check`: measured bytes and seconds as one line of JSON.

    python -m lamina.bench.plan_probe '{"shape": {...}, "config": {...}, ...}'

Started by hand it takes the job as its argument; under a launcher RANK and WORLD_SIZE tell which rank it is.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lamina.bench.gpt import GPT, VOCABULARY, GPTShape
from lamina.bench.report import process_memory
from lamina.engine import initialize

WARM_UP = 2


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps; peaks of the arenas by tier, growth of resident memory, median seconds of a step."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    batch, sequence, accumulation = job["micro_batch"], job["sequence"], job["accumulation"]
    tokens = torch.randint(VOCABULARY, (batch, sequence))
    _warm_up(job)
    before = process_memory()["rss"]
    _forget_peak()
    model = GPT(GPTShape(**job["shape"]))
    engine, _, _, _ = initialize(model=model, config=job["config"])
    seconds, passes = [], []
    with engine:
        plan = str(engine.plan)
        for _ in range(WARM_UP + job["steps"]):
            began = time.perf_counter()
            for _ in range(accumulation):
                engine.backward(engine(tokens, tokens))
                engine.step()
            seconds.append(time.perf_counter() - began)
            passes.append(engine.metrics().forward_s + engine.metrics().backward_s)
        metrics = engine.metrics()
        growth = process_memory()["peak_rss"] + _huge_bytes() - before
    if world > 1:
        torch.distributed.destroy_process_group()
    return {
        "rank": rank,
        "peak_bytes": {str(tier): nbytes for tier, nbytes in metrics.peak_bytes.items()},
        "rss_growth": growth,
        "step_s": median(seconds[WARM_UP:]),
        "passes_s": median(passes[WARM_UP:]),
        "plan": plan,
    }


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

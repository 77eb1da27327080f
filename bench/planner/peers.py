"""How fast ranks of this machine exchange bytes through gloo, as the engine's own do on CPUs.

Run as `python -m lamina.bench.planner.peers STORE RANK RANKS DTYPE NBYTES` by peer_rate(), once for each rank.
"""

import json
import sys
import tempfile
from pathlib import Path

from lamina.bench.nvme.gather import run_ranks

MODULE = "lamina.bench.planner.peers"
NBYTES = 16 << 20
MOST = 4
"""Processes that are started at most: each imports torch."""
TIMEOUT_S = 120.0


def peer_rate(ranks: int, dtype: str, nbytes: int = NBYTES) -> float:
    """Bytes per second that each of so many ranks receives in gathers of parameters and sums of gradients of this dtype (torch's
    name), with the adding up; at most MOST are started. Raises GatherError when they do not come to a result."""
    world = min(ranks, MOST)
    with tempfile.TemporaryDirectory(prefix="lamina-peers-") as folder:
        jobs = [[MODULE, f"{folder}/store", str(rank), str(world), dtype, str(nbytes)] for rank in range(world)]
        outputs = run_ranks(jobs, timeout_s=TIMEOUT_S, check=lambda: None)
    return min(float(json.loads(output)["rate"]) for output in outputs)


def exchange(store: Path, rank: int, world: int, dtype: str, nbytes: int) -> float:
    """One of the ranks: bytes received per second."""
    import torch

    from lamina.bench.planner.rates import exchange_rate

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rate = exchange_rate(getattr(torch, dtype), nbytes)
    torch.distributed.destroy_process_group()
    return rate


if __name__ == "__main__":
    folder, rank, world, dtype, nbytes = sys.argv[1:]
    print(json.dumps({"rate": exchange(Path(folder), int(rank), int(world), dtype, int(nbytes))}))

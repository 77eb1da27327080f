"""Bandwidth of an all-gather between two processes on this machine, over the loopback interface (gloo).

Run as `python -m lamina.bench.nvme.gather STORE RANK NBYTES SECONDS` by all_gather_rate(), twice.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MODULE = "lamina.bench.nvme.gather"
WORLD = 2
SHARD_BYTES = 32 << 20
ROUNDS_AT_LEAST = 3
POLL_S = 0.05


class GatherError(RuntimeError):
    """The processes did not come to a result; says why."""


def all_gather_rate(
    store: Path, *, seconds: float, timeout_s: float, check: Callable[[], None], shard_bytes: int = SHARD_BYTES
) -> float:
    """Bytes per second that each process receives. `store`: a file that does not exist yet, for the rendezvous.

    Raises GatherError when a process fails or both take longer than timeout_s.
    """
    jobs = [[MODULE, str(store), str(rank), str(shard_bytes), str(seconds)] for rank in range(WORLD)]
    return min(float(json.loads(output)["rate"]) for output in run_ranks(jobs, timeout_s=timeout_s, check=check))


def run_ranks(jobs: Sequence[Sequence[str]], *, timeout_s: float, check: Callable[[], None]) -> list[bytes]:
    """What processes print that meet over the loopback interface, each a module and its arguments; ``check`` is called while they
    run.

    Raises GatherError when one fails or all take longer than timeout_s; none is left.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            command, pipe = [sys.executable, "-m", *job], subprocess.PIPE
            worker = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
            workers.append(worker)
        end = time.monotonic() + timeout_s
        while codes := {worker.poll() for worker in workers} - {0}:
            check()
            if codes != {None}:
                raise GatherError(_last_line(next(worker for worker in workers if worker.poll())))
            if time.monotonic() > end:
                raise GatherError(f"not done after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return [worker.communicate()[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _last_line(worker: subprocess.Popen[bytes]) -> str:
    lines = worker.communicate()[1].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a process ended with exit code {worker.returncode}"


def gather(store: str, rank: int, nbytes: int, seconds: float) -> float:
    """One of the processes: bytes received per second."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    shard = torch.full((nbytes // 4,), float(rank))
    whole = torch.empty(WORLD * shard.numel())
    rounds: list[float] = []
    stop = torch.zeros(1)
    end = time.perf_counter() + seconds
    while not stop.item():
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, shard)
        rounds.append(time.perf_counter() - began)
        # Rank 0 decides for both: clocks differ, and a lone all-gather would never end.
        stop.fill_(float(len(rounds) > ROUNDS_AT_LEAST and time.perf_counter() > end))
        dist.broadcast(stop, 0)
    right = all(whole[other * shard.numel()].item() == other for other in range(WORLD))
    dist.destroy_process_group()
    if not right:
        raise GatherError("the all-gather gave wrong values")
    return (WORLD - 1) * shard.numel() * 4 / statistics.median(rounds[1:])


if __name__ == "__main__":
    print(json.dumps({"rate": gather(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))}))

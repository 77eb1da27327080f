"""DeepSpeed's async_io handle, driven by `lamina aio --peer-python`: a JSON line in for each order, one out for the answer.

Runs in an interpreter that has DeepSpeed and need not have lamina. Arguments: the file and the bytes of memory to take.
"""

import json
import os
import resource
import sys
import time
from typing import Any

LOCKED = (1 << 20, 32, False, True, 1)
"""Settings of the handle that owns the page-locked tensor; they do not matter to it."""


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(out: Any, path: str, nbytes: int) -> None:
    """Answer until the input ends."""
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found, unused-ignore]

    aio = AsyncIOBuilder().load(verbose=False)
    pool = aio.aio_handle(*LOCKED)
    ordinary = torch.empty(nbytes, dtype=torch.uint8)
    ordinary.view(torch.int64).random_()
    pinned = pool.new_cpu_locked_tensor(nbytes, ordinary)
    pinned.copy_(ordinary)
    memory = {"pinned": pinned, "ordinary": ordinary}
    print(json.dumps({"version": deepspeed.__version__}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        # Blocks of one size in overlapping events and one thread: what its own tuning finds best.
        handle = aio.aio_handle(order["block_bytes"], order["depth"], False, True, 1)
        move = handle.sync_pread if order["direction"] == "read" else handle.sync_pwrite
        tensor = memory[order["memory"]][: order["nbytes"]]
        cpu, start = cpu_seconds(), time.perf_counter()
        move(tensor, path, 0)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        print(json.dumps({"seconds": seconds, "cpu_s": cpu}), file=out, flush=True)


def main() -> None:
    """Keeps stdout for the answers: DeepSpeed logs there."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            serve(out, sys.argv[1], int(sys.argv[2]))
        except Exception as error:  # noqa: BLE001 - its build can fail in any way; the other side tells
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)


if __name__ == "__main__":
    main()

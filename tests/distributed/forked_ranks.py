"""Runs a script on several ranks that share one import of torch: ``python forked_ranks.py WORLD_SIZE SCRIPT ARGUMENT…``.

Each rank finds what torchrun would have put into its environment; the store through which they meet is this process's, as
torchrun's is its agent's. Importing torch once saves seconds of processor time for each rank. The first that fails ends all.
"""

import os
import runpy
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed

import lamina.engine.building  # noqa: F401 - for all ranks at once


def run_rank(rank: int, world_size: int, port: int, script: str, arguments: list[str]) -> None:
    """In a child: the script, as if it had been started alone."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def wait_for(children: set[int]) -> int:
    """0 when all succeeded; else the others are ended after the first that did not, and 1."""
    failed = False
    while children:
        pid, status = os.wait()
        children.discard(pid)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGTERM)
    return int(failed)


def start(world_size: int, script: str, arguments: list[str]) -> tuple[torch.distributed.TCPStore, set[int]]:
    """The store and the ranks' process ids; to be called again with the same or other scripts."""
    told, tell = os.pipe()  # the port: the store has threads, which must not be there when children are made
    children = set()
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            os.close(tell)
            run_rank(rank, world_size, int(os.read(told, 5)), script, arguments)
            sys.exit()
        children.add(pid)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    os.write(tell, f"{store.port:05d}".encode() * world_size)
    return store, children


def main(world_size: int, script: str, arguments: list[str]) -> int:
    _store, children = start(world_size, script, arguments)
    return wait_for(children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

"""A child that trains under a limit of address space: the plan and 2 percent. Run as: peak_memory.py FOLDER FACTOR.

The plan is the arena and the scratch buffers of the store; what the interpreter, the libraries and the I/O engine have
mapped before is counted apart. Prints one JSON line with what was planned and what was taken.
"""

import ctypes
import json
import resource
import sys
from pathlib import Path

from lamina.aio_native import AsyncIO
from lamina.tiers.memory.arena import Arena
from lamina.tiers.nvme.pinned_reader import PinnedReader
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.nvme.stream import SCRATCH_BYTES
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec, Tier

MIB = 1 << 20
PLANES = (PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.EXP_AVG, itemsize=4))
SHARDS = tuple(ShardSpec(name=f"block{i}", numel=16 * MIB + 13 * i, planes=PLANES) for i in range(4))
ARENA_BYTES = 256 * MIB


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def train(folder: str, io: AsyncIO) -> None:
    """Open, update, carry over, verify, pin and restore; more state than memory for it."""
    where = [NvmePath(path=folder)]
    with Arena(Tier.HOST, ARENA_BYTES, huge_pages=False) as arena:
        for step in range(2):
            with GenerationStore.open(where, job="j", rank=0, shards=SHARDS, io=io) as store:
                with store.begin() as transaction:
                    for shard in SHARDS[: len(SHARDS) if step == 0 else 2]:
                        blocks = [arena.alloc(shard.plane_bytes(spec.plane), shard.name) for spec in PLANES]
                        for spec, block in zip(PLANES, blocks, strict=True):
                            ctypes.memset(block.address, step + 1, block.nbytes)
                            transaction.write(shard.name, spec.plane, block.view)
                        for spec, block in zip(PLANES, blocks, strict=True):
                            transaction.read(shard.name, spec.plane, block.view).wait()
                        del blocks, block
                    if step:
                        transaction.copy_rest()
                    transaction.commit(step)
                store.pin(f"{folder}/pin{step}")
        assert arena.used == 0
    with PinnedReader(f"{folder}/pin1", io) as reader:
        reader.sums(check=True)


def main() -> None:
    folder, factor = sys.argv[1], float(sys.argv[2])
    with AsyncIO(queue_depth=8, bounce_bytes=2 << 20) as io:
        plan = ARENA_BYTES + SCRATCH_BYTES
        # Touch what the engine makes on first use, so that it is not taken for the store's.
        probe = bytearray(5000)
        with io.open(f"{folder}/probe", create=True, size=8192) as file:
            io.write(file, probe, 3).wait()
            io.read(file, probe, 3).wait()
        before_as, before_rss = status("VmSize"), status("VmRSS")
        resource.setrlimit(resource.RLIMIT_AS, (int(before_as + factor * plan), resource.RLIM_INFINITY))
        train(folder, io)
        print(
            json.dumps({"plan": plan, "resident": status("VmHWM") - before_rss, "mapped": status("VmPeak") - before_as})
        )


if __name__ == "__main__":
    main()

"""Starts a script on several ranks."""

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world_size: int, *arguments: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """``script`` under torchrun with gloo's defaults and one thread a rank; alone without torchrun. Not checked."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    return subprocess.run(
        [sys.executable, *(torchrun if world_size > 1 else ()), str(script), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

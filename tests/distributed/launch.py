"""Starts a script on several ranks."""

import os
import subprocess
import sys
from pathlib import Path

FORKED = Path(__file__).with_name("forked_ranks.py")


def run_ranks(
    script: Path, world_size: int, *arguments: object, timeout: float, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """``script`` on ranks with gloo's defaults and one thread each, forked from one process or (``torchrun``) as users start
    them; a single rank runs alone. Not checked."""
    command: tuple[str, ...] = ()
    if world_size > 1 and torchrun:
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    elif world_size > 1:
        command = (str(FORKED), str(world_size))
    return subprocess.run(
        [sys.executable, *command, str(script), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

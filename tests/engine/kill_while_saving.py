"""Run by test_checkpoint_kill: trains and saves over and over, telling each saved step, until it is killed.

A process that has loaded torch, and nothing else, forks one for each line of its input, so that a round costs no imports.
"""

import os
import sys
from pathlib import Path

import torch
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize


def main(folder: Path, first_tag: int) -> None:
    torch.set_num_threads(1)
    placed = on_nvme(folder / "n", param="none") if first_tag % 2 else {}
    engine, _, _, _ = initialize(build(width=16, hidden=32, blocks=2), config=settings(**placed), handle_signals=False)
    if (folder / "c").exists():
        engine.load_checkpoint(folder / "c")
    while True:
        engine.backward(engine(*batch(engine.global_steps)))
        engine.step()
        tag = "same" if engine.global_steps % 3 == 0 else None
        saved = engine.global_steps
        engine.save_checkpoint(folder / "c", tag=tag, keep_last=3, background=first_tag % 4 > 1)
        if first_tag % 4 > 1:
            engine.backward(engine(*batch(saved)))
            engine.step()
            engine.wait_for_checkpoint()
        print(saved, flush=True)


def serve() -> None:
    """For each line `folder number`: fork, tell the child's number, and when it is gone."""
    initialize(build(width=16, hidden=32, blocks=2), config=settings())[0].close()  # imports what is imported late
    for line in sys.stdin:
        folder, _, number = line.strip().rpartition(" ")
        child = os.fork()
        if child == 0:
            main(Path(folder), int(number))
        print(f"pid {child}", flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    serve()

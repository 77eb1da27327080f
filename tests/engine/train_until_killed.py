"""Run by test_stop_and_resume: trains on NVMe with kept state, tells each step and its loss, stops when it is told to.

Forks a child for each line `folder mode`, as kill_while_saving does. Modes: resume (go on), killed (the same, but after a few
steps it waits to be killed), stopped (in the third forward pass it says so and waits for a signal), cut (it kills itself after
step CUT was told and before it is committed).
"""

import itertools
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from small_model import build, on_nvme, settings
from torch.utils.data import TensorDataset

from lamina.engine import TrainingEngine, initialize

STEPS = 14
CUT = 4
KILLED_WITHIN = 2  # steps of one life, so that none outlives its kill however fast the machine is


def data() -> TensorDataset:
    tokens = torch.randint(0, 256, (40, 17), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def start(folder: Path, **options: Any) -> TrainingEngine:
    torch.manual_seed(0)
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": STEPS + 2}}
    extra = on_nvme(folder / "n", keep_state=True)
    config = settings(scheduler=schedule, gradient_accumulation_steps=2, bf16={"enabled": True}, **extra)
    model = build(width=16, hidden=32, blocks=2)
    return initialize(model, config=config, training_data=data(), **options)[0]


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    with start(folder, resume="auto", save_on_stop=folder / "c") as engine:
        if mode == "stopped":
            wait_in_forward(engine, 3)
        if mode == "cut":
            hold_commit(engine, CUT)
        first = engine.global_steps
        while engine.global_steps < STEPS:
            if mode == "killed" and engine.global_steps == first + KILLED_WITHIN:
                signal.pause()
            noise = torch.rand(1).item()  # the random state must go on, too
            loss = engine.train_batch()
            print(f"step {engine.global_steps} {loss.item():.9g} {engine.get_lr()[0]:.9g} {noise:.9g}", flush=True)
            if mode == "cut" and engine.global_steps == CUT:
                os.kill(os.getpid(), signal.SIGKILL)


def wait_in_forward(engine: TrainingEngine, number: int) -> None:
    """Let the forward pass of this number (from 1) tell that it has begun, and go on once a signal has come."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    numbers = itertools.count(1)

    def wait(*_: object) -> None:
        if next(numbers) == number:
            print("inside", flush=True)
            os.read(reader, 1)

    engine.module.register_forward_pre_hook(wait)


def hold_commit(engine: TrainingEngine, held: int) -> threading.Event:
    """Let the commit of one step wait for the event; everything but the manifest is on disk by then."""
    event, store = threading.Event(), engine.runtime.store
    assert store is not None
    publish = store.publish

    def late(targets: Any, step: int, *rest: Any) -> None:
        if step == held:
            event.wait()
        publish(targets, step, *rest)

    store.publish = late  # type: ignore[method-assign]
    return event


def serve() -> None:
    initialize(build(width=16, hidden=32, blocks=2), config=settings())[0].close()  # imports what is imported late
    for line in sys.stdin:
        folder, _, mode = line.strip().rpartition(" ")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                main(Path(folder), mode)
                code = 0
            except SystemExit as stop:
                code = int(str(stop.code))
            except KeyboardInterrupt:
                code = 130
            except BaseException:  # noqa: BLE001 - told, and the exit code says so
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        print(f"pid {child}", flush=True)
        _, status = os.waitpid(child, 0)
        print(f"gone {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    serve()

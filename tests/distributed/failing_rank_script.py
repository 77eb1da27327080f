"""Run on two ranks, without anybody to end the other: rank 1 fails in one place. Arguments: case, folder.

Every rank that ends writes what it ended with, and after how many seconds, into a file. Nothing is caught but what a case names.
"""

import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import SmallModel, batch, on_nvme, settings

from lamina.engine import TrainingEngine, initialize
from lamina.zero import get_full

SHAPE = {"width": 64, "hidden": 128, "blocks": 3, "vocab": 64}  # blocks that are groups of their own
FAILS_AT = 2  # the step, counted from 0
TIMEOUT = timedelta(seconds=333)


class Skipping(SmallModel):
    """Rank 1 leaves the last block out once."""

    calls = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == FAILS_AT + 1 and dist.get_rank() == 1:
            self.blocks = self.blocks[:-1]
        return super().forward(tokens, targets)


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("rank 1 cannot go on")


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    index = dist.get_rank()
    while True:
        yield batch(index, SHAPE["vocab"])
        index += dist.get_world_size()


def break_it(place: str, engine: TrainingEngine) -> None:
    """On rank 1: the next step fails there."""
    if place == "forward":
        engine.module.blocks[1].register_forward_pre_hook(fail)
    elif place == "backward":
        engine.module.blocks[1].register_full_backward_pre_hook(fail)
    elif place == "update":
        engine.runtime.updater._update = engine.runtime.updater._update_in_memory = fail  # type: ignore[method-assign]
    elif place == "loader":
        fail()


def train(engine: TrainingEngine, place: str) -> None:
    for index, item in enumerate(batches()):
        if index == FAILS_AT and dist.get_rank() == 1:
            break_it(place, engine)
        engine.backward(engine(*item))
        engine.step()
        if index == FAILS_AT + 2:
            return


def one_rank_drops(engine: TrainingEngine) -> None:
    """Rank 1 catches its error and wants to go on with the next batch."""
    data = batches()
    for index in range(3):
        if index == 1 and dist.get_rank() == 1:
            handle = engine.module.blocks[1].register_full_backward_pre_hook(fail)
            try:
                engine.backward(engine(*next(data)))
            except ValueError:
                engine.zero_grad()
            handle.remove()
        engine.backward(engine(*next(data)))
        engine.step()


def all_ranks_drop(engine: TrainingEngine) -> list[torch.Tensor]:
    """Each rank fails in another block: the sums that only one of them has begun must not be left over."""
    data = batches()
    for _ in range(2):
        handle = engine.module.blocks[2 * dist.get_rank()].register_full_backward_pre_hook(fail)
        try:
            engine.backward(engine(*batch(9, SHAPE["vocab"])))
        except ValueError:
            refusal = ""
            try:
                engine.step()
            except RuntimeError as error:
                refusal = str(error)
            assert "zero_grad(), on all ranks, drops the window" in refusal
            engine.zero_grad()
        handle.remove()
        engine.backward(engine(*next(data)))
        engine.step()
    return [get_full(parameter, "master") for parameter in engine.module.parameters()]  # type: ignore[misc]


def without_errors(engine: TrainingEngine) -> list[torch.Tensor]:
    data = batches()
    for _ in range(2):
        engine.backward(engine(*next(data)))
        engine.step()
    return [get_full(parameter, "master") for parameter in engine.module.parameters()]  # type: ignore[misc]


def engine_for(case: str, folder: Path) -> TrainingEngine:
    stage_1 = {"zero_optimization": {"stage": 1}}
    place = stage_1 if "stage 1" in case else on_nvme(folder / "state")
    torch.manual_seed(0)
    model = (Skipping if case.startswith("skip") else SmallModel)(**SHAPE)
    return initialize(model, config=settings(**place), handle_signals=False)[0]


def main(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    ended: dict[str, Any] = {"error": ""}
    began = time.perf_counter()
    try:
        if case.startswith("all drop"):
            with engine_for(case, folder) as engine:
                found = all_ranks_drop(engine)
            with engine_for(case, folder) as engine:
                assert all(map(torch.equal, found, without_errors(engine)))
            return
        engine = engine_for(case, folder)
        assert {
            lane.group._get_backend(torch.device("cpu")).options._timeout for lane in engine.runtime.ranks.lanes
        } == {TIMEOUT}
        if case.endswith("left open"):  # no close() but the one at the interpreter's end
            train(engine, case.split(",")[0])
        with engine:
            if case.startswith("one drops"):
                one_rank_drops(engine)
            else:
                train(engine, case.split(",")[0])
    except BaseException as error:
        ended["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (folder / f"ended{dist.get_rank()}").write_text(json.dumps(ended | {"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

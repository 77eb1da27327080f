"""Run by torchrun: state changes its homes on several ranks while training; every rank writes what it found to a file.

Arguments: folder, and parts with "/" in between. The parts: the names of ``PLACES`` (moves against none, with checkpoints in
between), "held" (a rank that cannot holds all), "failing" (a rank's step fails), "steered" (a rank's slow disk counts for all),
"killed" (every rank is killed between the steps of a move) and "resumed" (what was left then goes on).
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.engine.steering import Steering
from lamina.tiers import Block, Choice, Home, Measured, Placement, Revision, SpaceError, Tier, Transaction
from lamina.tiers.links.bandwidth import DISK
from lamina.zero import DivergenceError, get_full

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
WIDTH, STEPS = 128, 10
Homes = Mapping[int, tuple[Tier, Tier] | Home]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.out(x).square().mean()


def start(folder: str, *, stage: int = 3, param: str = "none", resume: Any = None, **changes: Any) -> TrainingEngine:
    torch.manual_seed(0)
    offload = {"offload_optimizer": {"device": "nvme"}}
    if stage == 3:
        offload["offload_param"] = {"device": param}
    tiers = {"nvme": [folder], "device_bytes": 2 << 20, "host_bytes": 4 << 20, **changes.pop("tiers", {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **offload},
        "tiers": tiers,
        **changes,
    }
    return initialize(Net(), config=config, resume=resume)[0]


def train(engine: TrainingEngine, last: int) -> list[float]:
    losses = []
    while engine.global_steps < last:
        seed = engine.global_steps * dist.get_world_size() + dist.get_rank()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = engine(x.to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine: TrainingEngine) -> list[torch.Tensor]:
    planes = [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg", "exp_avg_sq")]
    return [plane for plane in planes if plane is not None]


def placed(engine: TrainingEngine, homes: Homes) -> Placement:
    """The present placement with some segments (by number) elsewhere."""
    runtime, choice = engine.runtime, engine.runtime.decision.choice
    assert choice is not None
    wanted = dict(runtime.placement.homes)
    for index, home in homes.items():
        whole = home if isinstance(home, Home) else Home(param=home[0], state=home[1])
        wanted[runtime.segments[index].name] = whole
    return choice.question.placement_at(wanted)


def move(engine: TrainingEngine, homes: Homes) -> None:
    target = placed(engine, homes)
    obstacle = engine.runtime.migration.obstacle(target)
    assert obstacle is None, obstacle
    engine.runtime.migration.begin(target)


def homes_of(engine: TrainingEngine) -> dict[int, tuple[Tier, Tier]]:
    return {index: (s.param_tier, s.state_tier) for index, s in enumerate(engine.runtime.segments)}


# -- the parts ----------------------------------------------------------------------------------------------------------


def bits(folder: str, **options: Any) -> dict[str, Any]:
    """Losses and state with moves in, across memories, and out again, against those without; checkpoints on the way."""
    with start(folder, **options) as engine:
        wanted, ends, first = train(engine, STEPS), state(engine), homes_of(engine)
    with start(folder, **options) as engine:
        losses = train(engine, 2)
        part = Home(param=HOST, state=NVME, kept=1024)
        move(engine, {0: (HOST, HOST), 1: (NVME, NVME), 2: (DEVICE, HOST), 3: part})
        losses += train(engine, 3)
        came, kept = homes_of(engine), [engine.runtime.segments[3].kept]
        move(engine, {0: (DEVICE, HOST), 2: (HOST, HOST), 3: replace(part, kept=96)})
        losses += train(engine, 5)
        crossed = homes_of(engine)
        kept.append(engine.runtime.segments[3].kept)
        move(engine, first)
        saved = str(Path(folder) / "saved")
        engine.save_checkpoint(saved, tag="before")
        losses += train(engine, 6)
        engine.save_checkpoint(saved, tag="after")
        losses += train(engine, STEPS)
        found = {
            "losses": losses == wanted,
            "state": all(map(torch.equal, state(engine), ends)),
            "came": [came[index] for index in range(3)] == [(HOST, HOST), (NVME, NVME), (DEVICE, HOST)],
            "crossed": [crossed[0], crossed[2]] == [(DEVICE, HOST), (HOST, HOST)],
            "divided": kept == [1024, 96],
            "back": homes_of(engine) == first and engine.runtime.segments[3].kept == 0,
        }
        for tag, step in (("before", 5), ("after", 6)):
            engine.load_checkpoint(saved, tag=tag)
            found[tag] = train(engine, STEPS) == wanted[step:]
    with start(folder, **options) as engine:
        engine.load_checkpoint(saved, tag="before")
        found["another"] = train(engine, STEPS) == wanted[5:] and all(map(torch.equal, state(engine), ends))
    return found


def held(folder: str) -> dict[str, Any]:
    """What one rank cannot do none does: told beforehand, or found when it came to it."""
    alone = dist.get_rank() == 1
    found: dict[str, Any] = {}
    with start(folder) as engine:
        wanted, ends = train(engine, STEPS), state(engine)
    with start(folder) as engine:
        steering = engine._meter.steering
        losses = train(engine, 2)
        target = placed(engine, {0: (HOST, HOST)})
        found["free"] = steering._obstacle(target)
        fillers = fill(engine) if alone else []
        found["full"] = steering._obstacle(target)
        for filler in fillers:
            filler.free()
        found["different"] = steering._obstacle(placed(engine, {2: (HOST, HOST)}) if alone else target)
        move(engine, {0: (HOST, HOST), 1: (DEVICE, HOST)})
        losses += train(engine, 3)
        in_memory = homes_of(engine)
        move(engine, {0: (DEVICE, NVME), 2: (HOST, HOST)})
        if alone:
            refuse_more_files(engine)
        losses += train(engine, 5)
        found["disk full"] = [homes_of(engine) == in_memory, engine.runtime.migration.under_way]
        move(engine, {1: (DEVICE, NVME)})
        fillers = fill(engine) if alone else []
        losses += train(engine, 6)
        found["left although memory is full"] = homes_of(engine)[1] == (DEVICE, NVME)
        for filler in fillers:
            filler.free()
        found["losses"] = losses + train(engine, STEPS) == wanted
        found["state"] = all(map(torch.equal, state(engine), ends))
    return found


def fill(engine: TrainingEngine) -> list[Block]:
    """Take every hole of the host tier."""
    host, taken = engine.runtime.host, []
    while host.largest_hole:
        taken.append(host.alloc(host.largest_hole, "somebody else", align=1))
    return taken


def refuse_more_files(engine: TrainingEngine) -> None:
    """The next generation finds no room for files that hold more, once."""
    store = engine.runtime.store
    assert store is not None
    real: Callable[..., None] = store.leave_out

    def full(*_: Any) -> None:
        store.leave_out = real  # type: ignore[method-assign]
        raise SpaceError("no room for larger files", wanted=2, free=1)

    store.leave_out = full  # type: ignore[method-assign]


def failing(folder: str) -> dict[str, Any]:
    """One rank cannot write what leaves memory: it raises that, and the others do not wait for it for ever."""
    engine = start(folder)
    train(engine, 2)
    move(engine, {0: (DEVICE, HOST)})
    train(engine, 3)
    move(engine, {0: (DEVICE, NVME)})
    if dist.get_rank() == 1:

        def fail(_: Transaction) -> None:
            raise OSError(5, "Input/output error")

        engine.runtime.migration.write = fail  # type: ignore[method-assign]
    try:
        train(engine, STEPS)
    except (OSError, DivergenceError) as error:
        write_result(folder, {"error": type(error).__name__, "text": str(error), "step": engine.global_steps})
    os._exit(0)  # as a script that ends by the error would, without the engine's last words


def steered(folder: str) -> dict[str, Any]:
    """A disk that is slow for one rank counts as slow on all, and what they decide by it they do together."""
    with start(folder) as engine:
        wanted = train(engine, STEPS)
    with start(folder) as engine:
        steering = engine._meter.steering
        replanner = steering.replanner
        assert replanner is not None
        question = replanner.choice.question
        modelled = question.links.link(DISK).seconds(64 << 20, 64 << 20)
        times = 3.0 if dist.get_rank() == 1 else 1.0

        def slow(*_: Any) -> Measured | None:
            if dist.get_rank() == 0 and engine.global_steps % 2:
                return None  # a step that says nothing about others
            return Measured(link=DISK, read_bytes=64 << 20, written_bytes=64 << 20, busy_s=times * modelled)

        steering._measured = slow  # type: ignore[method-assign]
        steering._new_times = lambda _: None  # type: ignore[method-assign] # how long this machine computes is no part of it
        losses = train(engine, 5)
        factor = question.links.factor(DISK)
        better = Choice.given(question, placed(engine, {0: (HOST, HOST)}))
        revision = Revision(link=DISK, factor=3.0, expected_step_s=2.0, lower_bound_s=0.5, better=better)
        steering._act(replanner, revision)
        losses += train(engine, STEPS)
        return {
            "factor": factor,
            "moved": homes_of(engine)[0] == (HOST, HOST),
            "told": list(engine.plan.changes),
            "losses": losses == wanted,
        }


KEPT = {"tiers": {"keep_state": True}}


def killed(folder: str) -> dict[str, Any]:
    """All ranks die in the step that carries a move, after its commit."""
    with start(folder + "/straight", **KEPT) as engine:
        losses = train(engine, STEPS)
    engine = start(folder + "/kept", **KEPT)
    train(engine, 3)
    runtime = engine.runtime
    sentence = runtime.migration.obstacle(placed(engine, {0: (HOST, HOST)}))
    move(engine, {0: (NVME, NVME), 1: (HOST, NVME)})
    write_result(folder, {"losses": losses, "sentence": sentence})
    real = runtime.migration.after_commit

    def die() -> bool:
        real()
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    runtime.migration.after_commit = die  # type: ignore[method-assign]
    train(engine, STEPS)
    return {}


def resumed(folder: str) -> dict[str, Any]:
    with start(folder + "/kept", resume=True, **KEPT) as engine:
        first = engine.global_steps
        move(engine, {0: (HOST, NVME)})
        return {"first": first, "losses": train(engine, STEPS)}


def write_result(folder: str, result: dict[str, Any]) -> None:
    (Path(folder) / f"result{dist.get_rank()}").write_text(json.dumps(result))


PLACES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {},
    "stage 3, host": {"param": "cpu", "bf16": {"enabled": True}},
    "stage 3, nvme, clipped": {"param": "nvme", "gradient_clipping": 0.5},
}
PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{name: partial(bits, **options) for name, options in PLACES.items()},
    "held": held,
    "failing": failing,
    "steered": steered,
    "killed": killed,
    "resumed": resumed,
}


def main(folder: str, parts: str) -> None:
    torch.set_num_threads(1)
    Steering._new_times = lambda *_: None  # type: ignore[method-assign]  # no moves but those of the script
    dist.init_process_group("gloo")
    write_result(folder, {part: PARTS[part](folder) for part in parts.split("/")})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

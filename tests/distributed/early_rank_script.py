"""Run by torchrun: updates under the backward pass on several ranks against the same with a barrier; rank by rank to files.

Every case trains the same model twice, with ``tiers.overlap_update`` auto and false, and compares losses and state bit by
bit. Arguments: folder, and the cases' names ("all" for all of them), with "/" in between.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import Block, SmallModel, batch, build, on_nvme, settings

from lamina.engine import TrainingEngine, initialize
from lamina.zero import get_full

STEPS = 3
SHAPE = {"width": 64, "hidden": 128, "blocks": 3, "vocab": 64}  # blocks that are groups of their own


class Checkpointed(SmallModel):
    """The blocks' weights are used twice, and every use is computed again in the backward pass, by torch's means."""

    reentrant = True

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class CheckpointedAnew(Checkpointed):
    reentrant = False


class Shared(SmallModel):
    """The blocks' weights are used twice."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Scaled(Block):
    """A block with one more parameter, which it uses or not."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.scale = nn.Parameter(torch.ones(width))
        self.scales = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.scale if self.scales else x


class Unused(SmallModel):
    """One rank does not use a parameter of the block in the middle, in every other step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1] = Scaled(SHAPE["width"], SHAPE["hidden"])
        self.calls = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.blocks[1].scales = dist.get_rank() != 1 or self.calls % 2 == 0
        return super().forward(tokens, targets)


class Never(Unused):
    """No rank uses the last block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.never = Block(SHAPE["width"], SHAPE["hidden"])


class Watched:
    """Counts the updates that started while the backward pass of this rank was under way."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.under_backward = 0
        optimizer = engine.optimizer
        assert optimizer is not None
        real = optimizer.start_early

        def start(segment: Any, **options: Any) -> None:
            self.under_backward += torch._C._current_graph_task_id() != -1
            real(segment, **options)

        optimizer.start_early = start  # type: ignore[method-assign]


Train = Callable[[TrainingEngine, int], None]


def plain(engine: TrainingEngine, index: int) -> None:
    engine.backward(engine(*micro_batch(engine, index)))
    engine.step()


def two_losses(engine: TrainingEngine, index: int) -> None:
    """Two graphs over the same parameters: the second one's gradients come after updates have started."""
    losses = [engine(*micro_batch(engine, 2 * index + part)) * 0.5 for part in range(2)]
    for loss in losses:
        engine.backward(loss)
    engine.step()


def second_loss(engine: TrainingEngine, index: int) -> None:
    """The second loss would run blocks again after their update has started: every rank refuses, and goes on."""
    losses = [engine(*micro_batch(engine, 2 * index + part)) for part in range(2)]
    engine.backward(losses[0])
    refused = False
    try:
        engine.backward(losses[1])
    except RuntimeError as error:
        refused = "used again before step()" in str(error)
        if not refused:
            raise
    if refused != bool(engine.runtime.early_segments):
        raise AssertionError(f"refused: {refused}")
    engine.zero_grad()
    plain(engine, index)


def with_errors(engine: TrainingEngine, index: int) -> None:
    """In the middle of the backward pass every rank fails, and goes on without the window."""
    handle = engine.module.blocks[0].register_full_backward_pre_hook(fail)
    failing = engine(*micro_batch(engine, index + 100))
    try:
        engine.backward(failing)
        raise AssertionError("the backward pass has succeeded")
    except ValueError:
        engine.zero_grad()
    finally:
        handle.remove()
    del failing
    plain(engine, index)


def fail(*_: Any) -> None:
    raise ValueError("in the middle of the backward pass")


def micro_batch(engine: TrainingEngine, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(index * dist.get_world_size() + dist.get_rank(), SHAPE["vocab"])


def run(config: dict[str, Any], make: Callable[..., nn.Module], train: Train) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = make(**SHAPE)
    with initialize(model, config=config)[0] as engine:
        watched = Watched(engine)
        for index in range(STEPS * engine.config.gradient_accumulation_steps):
            train(engine, index)
        planes = ("master", "exp_avg", "exp_avg_sq")
        found = [get_full(parameter, plane) for parameter in model.parameters() for plane in planes]
    return [plane for plane in found if plane is not None], watched.under_backward


def cases(folder: str) -> dict[str, tuple[dict[str, Any], Callable[..., nn.Module], Train]]:
    everywhere = {
        "nvme": on_nvme(folder),
        "host": on_nvme(folder, param="cpu"),
        "memory": on_nvme(folder, param="none"),
        "stage 2": on_nvme(folder) | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
    }
    found: dict[str, tuple[dict[str, Any], Callable[..., nn.Module], Train]] = {}
    for name, place in everywhere.items():
        found[f"plain, {name}"] = settings(**place), build, plain
        found[f"unused, {name}"] = settings(**place), Unused, plain
        found[f"errors, {name}"] = settings(**place), build, with_errors
    for name in ("nvme", "stage 2"):
        place = everywhere[name]
        found[f"never, {name}"] = settings(**place), Never, plain
        found[f"accumulated, {name}"] = settings(gradient_accumulation_steps=2, **place), Unused, plain
        found[f"two losses, {name}"] = settings(**place), build, two_losses
        found[f"shared, {name}"] = settings(**place), Shared, plain
        found[f"checkpointed, {name}"] = settings(**place), Checkpointed, plain
        found[f"checkpointed anew, {name}"] = settings(**place), CheckpointedAnew, plain
        found[f"second loss, {name}"] = settings(**place), CheckpointedAnew, second_loss
        recomputed = place | {"tiers": place["tiers"] | {"activations": "host"}}
        found[f"recomputed, {name}"] = settings(**recomputed), Shared, plain
    clipped = settings(**everywhere["nvme"])
    found["clipped, nvme"] = clipped | {"gradient_clipping": 0.1}, build, plain
    return found


def main(folder: str, names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name, (config, make, train) in cases(folder).items():
        if names != "all" and name not in names.split("/"):
            continue
        found, early = run(config, make, train)
        wanted, none = run(config | {"tiers": config["tiers"] | {"overlap_update": False}}, make, train)
        results[name] = {"same": all(map(torch.equal, found, wanted)), "early": early, "without": none}
    (Path(folder) / f"result{dist.get_rank()}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains any module in plain PyTorch and through the engine, so that the two can be compared bit by bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina.engine import initialize
from lamina.engine.face import loss_of
from lamina.zero import get_full

LR, DECAY = 1e-3, 0.1
Build = Callable[[], nn.Module]
Inputs = Callable[[int], Any]


@dataclass
class Outcome:
    """Losses in order, every parameter by name, and every buffer by name."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def call(module: Callable[..., Any], inputs: Any) -> torch.Tensor:
    """Run it on a mapping, a tuple or one argument, and find the loss in what it returns."""
    if isinstance(inputs, dict):
        return loss_of(module(**inputs))
    return loss_of(module(*inputs) if isinstance(inputs, tuple) else module(inputs))


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def built(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build()


def train_plain(build: Build, inputs: Inputs, *, steps: int = 3, accumulation: int = 1, **context: Any) -> Outcome:
    """torch.optim.AdamW(fused=True) on the plain module, everything in memory."""
    module = built(build)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY, fused=True)
    outcome = Outcome()
    for step in range(steps):
        for micro in range(accumulation):
            loss = call(module, inputs(step * accumulation + micro))
            (loss if accumulation == 1 else loss / accumulation).backward()
            outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        between_steps(module, module, inputs, context, outcome)
    outcome.parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    outcome.buffers = buffers_of(module)
    return outcome


def train_tiered(
    build: Build, inputs: Inputs, config: dict[str, Any], *, steps: int = 3, accumulation: int = 1, **context: Any
) -> Outcome:
    """The same through initialize() with a config of lamina."""
    module = built(build)
    engine, _, _, _ = initialize(module, config=config | {"gradient_accumulation_steps": accumulation})
    outcome = Outcome()
    with engine:
        for index in range(steps * accumulation):
            loss = call(engine, inputs(index))
            engine.backward(loss)
            engine.step()
            outcome.losses.append(loss.item())
            if (index + 1) % accumulation == 0:
                between_steps(engine, module, inputs, context, outcome)
        for name, parameter in module.named_parameters():
            found = get_full(parameter, "master" if parameter.requires_grad else "param")
            assert found is not None
            outcome.parameters[name] = found
        outcome.buffers = buffers_of(module)
    return outcome


def between_steps(runner: Any, module: nn.Module, inputs: Inputs, context: dict[str, Any], outcome: Outcome) -> None:
    """With ``evaluate``: a forward without gradients in evaluation mode, whose loss counts too."""
    if not context.get("evaluate"):
        return
    module.eval()
    with torch.no_grad():
        outcome.losses.append(call(runner, inputs(10_000)).item())
    module.train()


def differences(left: Outcome, right: Outcome) -> Iterator[str]:
    """What is not bit-equal."""
    if left.losses != right.losses:
        yield f"losses {left.losses} and {right.losses}"
    for kind in ("parameters", "buffers"):
        ours, theirs = getattr(left, kind), getattr(right, kind)
        if list(ours) != list(theirs):
            yield f"{kind} {list(ours)} and {list(theirs)}"
            continue
        for name in ours:
            a, b = ours[name], theirs[name]
            if a.shape != b.shape or not torch.equal(a, b):
                yield f"{name} {tuple(a.shape)} differs by {(a.double() - b.double()).abs().max().item():.3g}"


def memory(**changes: Any) -> dict[str, Any]:
    """Everything in memory."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": 3},
        **changes,
    }


def nvme(path: object, **tiers: Any) -> dict[str, Any]:
    """Parameters and optimizer state on nvme; ``device_bytes`` is the window."""
    return memory(
        zero_optimization={
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        tiers={"nvme": [str(path)], **tiers},
    )

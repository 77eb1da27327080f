"""A small GPT-like module and its data, with and without a tied head, for tests of the engine."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.zero import get_full


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """``width`` and ``hidden`` decide whether every parameter's length is a multiple of 16."""

    def __init__(
        self, *, width: int = 64, hidden: int = 256, blocks: int = 4, tied: bool = True, vocab: int = 256
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def batch(index: int, vocab: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab, (2, 17), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1], tokens[:, 1:]


def build(**options: Any) -> SmallModel:
    torch.manual_seed(0)
    return SmallModel(**options)


def train_steps(engine: TrainingEngine, first: int, last: int) -> list[float]:
    """Losses of the steps from ``first`` to before ``last``, one micro-batch each."""
    losses = []
    for index in range(first, last):
        loss = engine(*batch(index))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bytes_read(engine: TrainingEngine) -> int:
    """So far, by this engine, with all that is read ahead for the next step."""
    updater, store, io = engine.runtime.updater, engine.runtime.store, engine.runtime.io
    assert store is not None
    assert io is not None
    trained = sum(segment.trainable for segment in engine.runtime.segments)
    expected, until = min(len(updater.staging), trained), time.monotonic() + 60
    while len(updater._ahead) < expected:
        assert time.monotonic() < until, "nothing is read ahead"
        time.sleep(0.001)
    store.settle()  # some reads begin when what they read is written
    io.drain()
    return io.stats().bytes_read


Outcome = tuple[list[float], list[torch.Tensor]]


def train_with_engine(
    config: dict[str, Any], *, steps: int = 4, model: nn.Module | None = None, **options: Any
) -> Outcome:
    """Losses of every micro-batch and the final fp32 masters."""
    model = model or build(**options)
    engine, _, _, _ = initialize(model, config=config)
    with engine:
        losses = []
        for index in range(steps * engine.config.gradient_accumulation_steps):
            loss = engine(*batch(index, model.vocab))  # type: ignore[arg-type]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        masters = [get_full(parameter, "master") for parameter in model.parameters()]
    return losses, [master for master in masters if master is not None]


def train_with_torch(
    *, steps: int = 4, accumulation: int = 1, lr: float = 1e-3, decay: float = 0.1, **options: Any
) -> Outcome:
    """Plain PyTorch, everything in memory, fused AdamW."""
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = model(*batch(step * accumulation + micro, model.vocab))
            (loss if accumulation == 1 else loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in model.parameters()]


def differences(left: Outcome, right: Outcome) -> Iterator[str]:
    """What is not bit-equal."""
    if left[0] != right[0]:
        yield f"losses {left[0]} and {right[0]}"
    for index, (a, b) in enumerate(zip(left[1], right[1], strict=True)):
        if not torch.equal(a, b):
            yield f"parameter {index} differs by {(a - b).abs().max().item():.3g}"


def settings(**changes: Any) -> dict[str, Any]:
    """A config without clipping, with the optimizer that train_with_torch uses."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        **changes,
    }


def on_nvme(path: object, *, param: str = "nvme", optimizer: str = "nvme", **tiers: Any) -> dict[str, Any]:
    """Config blocks that put parameters and optimizer state on the named devices of DeepSpeed's dialect."""
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param},
            "offload_optimizer": {"device": optimizer},
        },
        "tiers": {"nvme": [str(path)], **tiers},
    }

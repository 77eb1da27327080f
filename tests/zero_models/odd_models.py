"""Small modules with the habits of real ones: ties, repeated and skipped calls, adapters, reads outside a forward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Base: an embedding, layers and a head; ``run`` decides how the layers are used in a step."""

    def __init__(self, layers: int = 4, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, index: int, tokens: torch.Tensor) -> torch.Tensor:
        x = self.run(index, self.embed(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1)[:-1], tokens.flatten()[1:])

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        del index
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(index: int) -> tuple[int, torch.Tensor]:
    return index, torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(index))


class TiedBlocks(Stack):
    """The head is the embedding, and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[3].norm = self.layers[1].norm


class Repeated(Stack):
    """Layers are called once, twice and three times."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for times, layer in enumerate(self.layers[:3], start=1):
            for _ in range(times):
                x = layer(x)
        return self.layers[3](x)


class SkipsMiddle(Stack):
    """The middle layer is skipped on odd steps."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or index % 2 == 0:
                x = layer(x)
        return x


class SkipsLast(Stack):
    """The last layer is skipped on odd steps."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 4 - index % 2]:
            x = layer(x)
        return x


class Reversing(Stack):
    """Layers run in reverse order on odd steps."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        order = list(self.layers)
        for layer in reversed(order) if index % 2 else order:
            x = layer(x)
        return x


class Branching(Stack):
    """One of three branches, and one that is never used."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.layers[index % 3](x)
        return self.layers[(index + 1) % 3](x)


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank side path."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Linear(frozen.in_features, 4, bias=False)
        self.b = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(x))


class Adapted(Stack):
    """Everything frozen but the adapters; one layer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers[:3]:
            layer.up = Adapter(layer.up)


class ReadsOutside(Stack):
    """Parameters of children are read by their parent, as a term, as an operand and through their data."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + layer.norm.weight * 0.1 + self.layers[0].down.bias.mean()
            x = F.linear(x, layer.up.weight[:WIDTH], layer.norm.bias)
        penalty = sum(parameter.square().sum() for parameter in self.layers[1].parameters())
        return x + 1e-3 * penalty + float(self.layers[2].up.weight.data.abs().max()) * 0.01


class Scalars(Stack):
    """A 0-dim parameter, one of one element, empty ones first, inside and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers[1].empty = nn.Parameter(torch.empty(3, 0))
        self.layers[2].one = nn.Parameter(torch.ones(1))
        self.last = nn.Parameter(torch.empty(0))

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = super().run(index, x)
        nothing = self.first.sum() + self.last.sum() + self.layers[1].empty.sum()
        return x * self.scale + self.layers[2].one + nothing


class Mixed(Stack):
    """bfloat16 layers inside a float32 model, and a frozen float64 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].to(torch.bfloat16)
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.25, dtype=torch.float64), requires_grad=False)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x.bfloat16()).float()
        return self.layers[2](x) + self.offset.float()


class Normalised(Stack):
    """Buffers that a forward changes: running statistics, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().run(index, x)
        return self.statistics(x.flatten(0, 1)).view(x.shape)


class Checkpointed(Stack):
    """Activation checkpointing: "off", "reentrant" or "not reentrant"."""

    def __init__(self, kind: str = "off", *, tied: bool = False) -> None:
        super().__init__()
        self.kind = kind
        if tied:
            self.layers[2].up.weight = self.layers[0].up.weight

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[1]]:
            x = layer(x) if self.kind == "off" else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x


class Autocast(Stack):
    """Runs its layers under torch.autocast."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = super().run(index, x)
        return x.float()


class Hooked(Stack):
    """Other people's hooks: on a module's input, output and gradient, and on a parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
        self.layers[1].register_forward_hook(lambda module, args, output: output + module.norm.weight)
        self.layers[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        self.layers[3].up.weight.register_hook(lambda gradient: gradient * 2)


class Nested(Stack):
    """Parameters handed to children in containers, and a module that returns a dictionary of tensors."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, Any] = {"x": x}
        for layer in self.layers:
            found = {"x": layer(found["x"]), "old": (found["x"], [found["x"]])}
        stacked = torch.stack([layer.norm.weight for layer in self.layers]).mean(0)
        return found["x"] + stacked + torch.cat([self.layers[0].norm.bias, self.layers[1].norm.bias])[:WIDTH]


MODELS = {
    kind.__name__: kind
    for kind in (
        TiedBlocks,
        Repeated,
        SkipsMiddle,
        SkipsLast,
        Reversing,
        Branching,
        Adapted,
        ReadsOutside,
        Scalars,
        Mixed,
        Normalised,
        Autocast,
        Hooked,
        Nested,
    )
}

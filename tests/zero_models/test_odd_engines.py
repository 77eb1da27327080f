"""Engines in unusual company: several at once, sparse gradients, dtypes without NaN, compilers, huge or very many parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_ways import built, differences, memory, nvme, train_plain, train_tiered
from odd_models import WIDTH, Stack, tokens
from torch import nn

from lamina.engine import initialize
from lamina.tiers import LockedError, PlacementError
from lamina.zero import get_full


def test_two_jobs_on_one_path_are_apart_and_a_second_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Case A-04: each equals its solo run, and the end of one leaves the other's files alone."""
    builds: dict[str, Callable[[], nn.Module]] = {"long": Stack, "short": lambda: Stack(layers=2)}
    modules = {job: built(build) for job, build in builds.items()}
    engines = {job: initialize(module, config=nvme(tmp_path, job=job))[0] for job, module in modules.items()}
    with pytest.raises(LockedError, match=r"another name or another path in tiers\.nvme"):
        initialize(built(Stack), config=nvme(tmp_path, job="long"))
    for index in range(3):
        for engine in engines.values():
            engine.backward(engine(*tokens(index)))
            engine.step()
    engines["short"].close()
    assert [folder.name for folder in tmp_path.iterdir()] == ["long"]
    with engines["long"] as engine:
        engine.backward(engine(*tokens(3)))
        engine.step()
        found = {name: get_full(parameter) for name, parameter in modules["long"].named_parameters()}
    wanted = train_plain(Stack, tokens, steps=4).parameters
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert list(tmp_path.iterdir()) == []


class SparseStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed.sparse = True
        self.bag = nn.EmbeddingBag(64, WIDTH, sparse=True, mode="sum")

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return super().run(index, x + self.bag(tokens(index)[1])[:, None])


class DenseStack(SparseStack):
    def __init__(self) -> None:
        super().__init__()
        self.embed.sparse = self.bag.sparse = False


def test_sparse_gradients_count_as_dense_ones(tmp_path: Path) -> None:
    plain = train_plain(DenseStack, tokens, accumulation=2)
    for config in (memory(), nvme(tmp_path)):
        tiered = train_tiered(SparseStack, tokens, config, accumulation=2)
        for name, wanted in plain.parameters.items():  # repeated tokens are summed in another order
            torch.testing.assert_close(tiered.parameters[name], wanted, rtol=1e-5, atol=1e-6)


class ComplexStack(Stack):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.full((4,), 0.5 + 1j), requires_grad=trained)
        self.shift = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return super().run(index, x) * self.turn.real[0] + self.shift


def test_complex_parameters_are_refused_by_name_and_frozen_ones_of_any_dtype_are_used(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="turn is complex64"):
        initialize(built(lambda: ComplexStack(trained=True)), config=memory())
    frozen = lambda: ComplexStack(trained=False)  # noqa: E731
    plain = train_plain(frozen, tokens)
    assert list(differences(train_tiered(frozen, tokens, nvme(tmp_path)), plain)) == []


def test_integers_are_never_replaced_by_a_placeholder(tmp_path: Path) -> None:
    module = built(lambda: ComplexStack(trained=False))
    with initialize(module, config=nvme(tmp_path))[0]:
        assert torch.equal(module.shift, torch.arange(WIDTH))
        assert torch.isnan(module.embed.weight).all()


def two_lengths(index: int) -> tuple[int, torch.Tensor]:
    turn, sequence = tokens(index)
    return turn, sequence[:, : 8 - 3 * (index % 2)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, while it loads inductor
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_modules_train_in_memory_and_are_refused_where_parameters_are_fetched(
    backend: str, when: str, tmp_path: Path
) -> None:
    """Case C-22. Compiled code may round otherwise than torch's own, so the same module is compiled for plain torch too."""

    def train(config: dict[str, Any]) -> list[float]:
        module = built(Stack)
        if when == "before":
            module.layers[1] = torch.compile(module.layers[1], backend=backend)
        losses = []
        with initialize(module, config=config)[0] as engine:
            if when == "after":
                module.layers[1].compile(backend=backend)
            for index in range(5):
                loss = engine(*two_lengths(index))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return losses

    def compiled() -> nn.Module:
        module = Stack()
        module.layers[1].compile(backend=backend)
        return module

    wanted = train_plain(compiled, two_lengths, steps=5).losses
    for stage in (0, 3):
        assert train(memory(zero_optimization={"stage": stage})) == wanted, stage
    with pytest.raises(TypeError, match=r"layers\.1 is compiled"):
        train(nvme(tmp_path))
    assert list(tmp_path.iterdir()) == []


class LargeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37_500, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).square().mean()


def test_an_embedding_larger_than_the_window_is_refused_with_name_size_and_remedy(tmp_path: Path) -> None:
    """Case A-08; the value that the refusal names works."""
    with pytest.raises(PlacementError, match=r"embed.weight with 1,200,000 elements, 4,800,000 bytes") as refusal:
        initialize(LargeEmbedding(), config=nvme(tmp_path, device_bytes=4_000_000))
    least = int(str(refusal.value).split("Write ")[1].split(" or more")[0].replace(",", ""))
    found = train_tiered(LargeEmbedding, tokens, nvme(tmp_path, device_bytes=least), steps=2)
    assert list(differences(found, train_plain(LargeEmbedding, tokens, steps=2))) == []


class ManyParameters(nn.Module):
    """3,000 parameters of 16 to 64 elements, a third of them unused in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(1, 16 * (1 + index % 4)) for index in range(1500))

    def forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        used = [expert for number, expert in enumerate(self.experts) if (number + index) % 3]
        return torch.stack([expert(x[:1, :1].float()).square().mean() for expert in used]).mean()


def test_three_thousand_tiny_parameters_and_a_long_path(tmp_path: Path) -> None:
    """Case A-06."""
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    found = train_tiered(ManyParameters, tokens, nvme(folder), steps=2)
    assert list(differences(found, train_plain(ManyParameters, tokens, steps=2))) == []

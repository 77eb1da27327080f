"""Hugging Face models, unchanged, train through the engine with the numbers of plain PyTorch, bit by bit."""

from pathlib import Path

import pytest
from both_ways import differences, memory, nvme, train_plain, train_tiered
from torch import nn

from lamina.zero import Init

pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
from hf_models import MODELS


def parameter_bytes(name: str) -> int:
    return sum(parameter.numel() * 4 for parameter in MODELS[name][0]().parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_five_steps_on_nvme_in_half_the_memory_are_bit_equal(name: str, tmp_path: Path) -> None:
    config = nvme(tmp_path, device_bytes=parameter_bytes(name) // 2)
    assert list(differences(train_tiered(*MODELS[name], config, steps=5), train_plain(*MODELS[name], steps=5))) == []


@pytest.mark.parametrize(
    ("name", "activations"),
    [("gpt2", "host"), ("gpt2", "nvme"), ("llama", "device"), ("bert", "nvme"), ("t5", "host"), ("mixtral", "nvme")],
)
def test_blocks_computed_again_are_bit_equal(name: str, activations: str, tmp_path: Path) -> None:
    config = nvme(tmp_path, activations=activations)
    run = {"steps": 3, "accumulation": 2}
    assert list(differences(train_tiered(*MODELS[name], config, **run), train_plain(*MODELS[name], **run))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_are_bit_equal_everywhere(name: str, tmp_path: Path) -> None:
    run = {"steps": 20, "accumulation": 2, "evaluate": True}
    plain = train_plain(*MODELS[name], **run)
    for config in (memory(), nvme(tmp_path), nvme(tmp_path, device_bytes=parameter_bytes(name) // 2)):
        assert list(differences(train_tiered(*MODELS[name], config, **run), plain)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_built_under_init_are_bit_equal(name: str, tmp_path: Path) -> None:
    """Their weights are drawn anew from the top when all modules are finished and put away."""
    build, batch = MODELS[name]
    config = nvme(tmp_path)

    def under_init() -> nn.Module:
        with Init(config=config, open_bytes=0):
            return build()

    assert list(differences(train_tiered(under_init, batch, config, steps=3), train_plain(build, batch, steps=3))) == []

"""Modules with the habits of real ones train with the numbers of plain PyTorch: cases C-10, C-12, C-15, C-20 and more."""

from collections.abc import Callable
from pathlib import Path

import pytest
from both_ways import differences, memory, nvme, train_plain, train_tiered
from odd_models import MODELS, Checkpointed, Mixed, Stack, tokens

WINDOW = 40_000  # bytes; the models have 68,000 and more


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Mixed"])
def test_odd_models_are_bit_equal_to_plain_torch_in_memory_and_through_a_small_window(
    name: str, accumulation: int, tmp_path: Path
) -> None:
    run = {"steps": 4, "accumulation": accumulation, "evaluate": True}
    plain = train_plain(MODELS[name], tokens, **run)
    for config in (memory(), nvme(tmp_path, device_bytes=WINDOW)):
        assert list(differences(train_tiered(MODELS[name], tokens, config, **run), plain)) == []


def test_mixed_dtypes_are_bit_equal_across_tiers_and_start_where_torch_does(tmp_path: Path) -> None:
    """torch has no fp32 masters for the bfloat16 layer, so only the first loss can be the same."""
    run = {"steps": 4, "evaluate": True}
    in_memory = train_tiered(Mixed, tokens, memory(), **run)
    assert list(differences(train_tiered(Mixed, tokens, nvme(tmp_path, device_bytes=WINDOW), **run), in_memory)) == []
    assert in_memory.losses[0] == train_plain(Mixed, tokens, **run).losses[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_activation_checkpointing_on_and_off_are_bit_equal(kind: str, tied: bool, tmp_path: Path) -> None:
    def build(kind: str) -> Callable[[], Stack]:
        return lambda: Checkpointed(kind, tied=tied)

    plain = train_plain(build("off"), tokens)
    for config in (memory(), nvme(tmp_path, device_bytes=WINDOW)):
        assert list(differences(train_tiered(build(kind), tokens, config), plain)) == []

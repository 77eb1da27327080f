"""Promise P1: every placement gives the same numbers, and in fp32 those of plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import differences, on_nvme, settings, train_with_engine, train_with_torch

PLACEMENTS: dict[str, dict[str, Any]] = {
    "everything on nvme": {},
    "optimizer on nvme, parameters in memory": {"param": "none"},
    "parameters on nvme, optimizer on the host": {"optimizer": "cpu"},
    "no update under the backward pass": {"overlap_update": False},
    "threads backend": {"io_backend": "threads"},
    "three generations": {"generations": 3},
    "in place": {"generations": 1},
    "checked on every read": {"verify": "always"},
    "no lookahead": {"lookahead": 0},
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fp32_is_bit_equal_to_plain_torch(placement: str, accumulation: int, tmp_path: Path) -> None:
    config = settings(gradient_accumulation_steps=accumulation, **on_nvme(tmp_path, **PLACEMENTS[placement]))
    tiered = train_with_engine(config)
    assert list(differences(tiered, train_with_torch(accumulation=accumulation))) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_in_memory_is_bit_equal_to_plain_torch(stage: int) -> None:
    in_memory = train_with_engine(settings(zero_optimization={"stage": stage}))
    assert list(differences(in_memory, train_with_torch())) == []


@pytest.mark.parametrize("device_bytes", [140_000, 280_000, 420_000])
def test_any_window_gives_the_same_numbers(device_bytes: int, tmp_path: Path) -> None:
    """From one group at a time up to three; untied, so that the head is fetched a second time."""
    config = settings(**on_nvme(tmp_path, device_bytes=device_bytes, host_bytes=3_000_000))
    tiered = train_with_engine(config, tied=False)
    assert list(differences(tiered, train_with_torch(tied=False))) == []


@pytest.mark.parametrize("sub_group_size", [1, 600_000, 10**9])
def test_any_sub_group_size_gives_the_same_numbers(sub_group_size: int, tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path))
    config["zero_optimization"]["sub_group_size"] = sub_group_size
    wide = {"width": 512, "hidden": 2048, "blocks": 1}
    tiered = train_with_engine(config, steps=2, **wide)
    assert list(differences(tiered, train_with_torch(steps=2, **wide))) == []


def test_lengths_that_are_no_multiple_of_16_are_within_rounding_of_torch_and_equal_across_tiers(tmp_path: Path) -> None:
    odd = {"width": 13, "hidden": 29, "blocks": 3, "vocab": 101}
    in_memory = train_with_engine(settings(), **odd)
    tiered = train_with_engine(settings(**on_nvme(tmp_path)), **odd)
    assert list(differences(tiered, in_memory)) == []
    for ours, theirs in zip(in_memory[1], train_with_torch(**odd)[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bf16_is_bit_equal_across_tiers(placement: str, accumulation: int, tmp_path: Path) -> None:
    common = {"bf16": {"enabled": True}, "gradient_accumulation_steps": accumulation}
    in_memory = train_with_engine(settings(**common))
    tiered = train_with_engine(settings(**common, **on_nvme(tmp_path, **PLACEMENTS[placement])))
    assert list(differences(tiered, in_memory)) == []


def test_clipping_is_the_same_on_every_tier_and_near_torch(tmp_path: Path) -> None:
    clipped = {"gradient_clipping": 0.05}
    in_memory = train_with_engine(settings(**clipped))
    tiered = train_with_engine(settings(**clipped, **on_nvme(tmp_path)))
    assert list(differences(tiered, in_memory)) == []
    unclipped = train_with_engine(settings())
    assert in_memory[0] != unclipped[0], "the norm is above 0.05, so clipping must matter"

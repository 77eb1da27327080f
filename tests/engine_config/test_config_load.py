"""EngineConfig.load: values, defaults and the collection of problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lamina.engine.config import ConfigError, EngineConfig


def test_a_full_config_keeps_its_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 16,
                "gradient_accumulation_steps": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95]}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "bf16": {"enabled": True},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/disk"},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
                    "sub_group_size": 1e6,
                },
                "tiers": {"host_bytes": "512MiB"},
            }
        )
    )
    config = EngineConfig.load(path, world_size=2)
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.compute_dtype == "bf16"
    assert config.grad_accum_dtype == "fp32"
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.sub_group_size == 1_000_000
    assert config.tiers.host_bytes == 512 * 2**20
    assert [entry.path for entry in config.nvme_paths] == ["/disk"]
    on_nvme = dict.fromkeys(("param", "remainder", "master", "exp_avg", "exp_avg_sq"), "nvme")
    assert config.placement() == {**on_nvme, "grad": "host"}


def test_all_problems_are_raised_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"train_batch_sizes": 8, "steps_per_print": 0, "zero_optimization": {"stage": "3"}})
    assert [problem.path for problem in caught.value.problems] == [
        "train_batch_sizes",
        "steps_per_print",
        "zero_optimization.stage",
    ]

"""Configs in the shapes that people publish for DeepSpeed: each loads unchanged and means what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from public_configs import CONFIGS, placed

from lamina.engine.config import EngineConfig

MEMORY, NVME = ("device", "device", "device"), ("nvme", "nvme", "host")
WANTED: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "zero 1, bf16, warm-up": (
        {"compute_dtype": "bf16", "train_micro_batch_size_per_gpu": 2, "steps_per_print": 2000},
        MEMORY,
    ),
    "zero 2, fp16, dynamic scale": ({"compute_dtype": "fp16", "train_micro_batch_size_per_gpu": 2}, MEMORY),
    "zero 2, optimizer on the host, cosine": (
        {"train_batch_size": 6, "grad_accum_dtype": "fp32"},
        ("device", "host", "host"),
    ),
    "zero 3, all on the host": (
        {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5},
        ("host", "host", "host"),
    ),
    "zero 3, nvme, bf16": ({"compute_dtype": "bf16", "activations": "host"}, NVME),
    "zero 3, nvme, fp16, static scale": ({"compute_dtype": "fp16", "train_batch_size": 4}, NVME),
    "trainer, zero 3": ({"compute_dtype": "bf16", "train_batch_size": 4}, ("host", "host", "host")),
    "trainer, zero 3, fp16": ({"compute_dtype": "fp16", "train_batch_size": 4}, ("host", "host", "host")),
    "accelerate, left on auto": ({"train_batch_size": 4, "steps_per_print": None}, MEMORY),
    "linear decay": ({"compute_dtype": "fp32", "train_micro_batch_size_per_gpu": 2}, MEMORY),
    "one cycle": ({"compute_dtype": "fp32", "gradient_clipping": 1.0}, MEMORY),
    "range test with momentum": ({"train_batch_size": 2}, MEMORY),
    "zero 0": ({"compute_dtype": "bf16", "gradient_clipping": 0.1}, MEMORY),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_shapes_load_unchanged(name: str) -> None:
    loaded = EngineConfig.load(placed(CONFIGS[name], Path("/local_nvme")))
    wanted, where = WANTED[name]
    assert {key: getattr(loaded, key) for key in wanted} == wanted
    placement = loaded.placement()
    assert (placement["param"], placement["exp_avg"], placement["grad"]) == where


def test_what_watches_a_run_loads_too() -> None:
    watched = {
        "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
    }
    assert EngineConfig.load(CONFIGS["zero 0"] | watched).compute_dtype == "bf16"


def test_a_published_nvme_config_lists_its_hints_once() -> None:
    loaded = EngineConfig.load(placed(CONFIGS["zero 3, nvme, bf16"], Path("/local_nvme")))
    hints = [hint.partition(":")[0] for hint in loaded.hints]
    assert len(hints) == len(set(hints))
    assert {"zero_optimization.offload_optimizer.pipeline_read", "zero_optimization.offload_param.buffer_size"} <= set(
        hints
    )
    assert "aio.thread_count" in hints
    assert "zero_optimization.stage3_prefetch_bucket_size" not in hints

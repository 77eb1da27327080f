"""Configs in the shapes that people publish for DeepSpeed: each loads unchanged and means what it says."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.engine.config import EngineConfig

ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}

ZERO_1 = {
    "train_batch_size": 8,
    "steps_per_print": 2000,
    "optimizer": ADAM,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
}
ZERO_2_FP16 = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "torch_adam": True}},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "zero_allow_untested_optimizer": True,
}
ZERO_2_OFFLOAD = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
ZERO_3_CPU = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "optimizer": ADAM,
    "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
}
ZERO_3_NVME = {
    "train_batch_size": 8,
    "optimizer": ADAM,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
            "pipeline_read": True,
            "pipeline_write": True,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1e4,
    },
    "aio": AIO,
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
}
ACCELERATE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": float("inf"),
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}
ONE_CYCLE = {
    "train_batch_size": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "adam_w_mode": False}},
    "scheduler": {
        "type": "OneCycle",
        "params": {
            "cycle_first_step_size": 1000,
            "cycle_first_stair_count": 500,
            "cycle_second_step_size": 1000,
            "cycle_second_stair_count": 500,
            "decay_step_size": 1000,
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "decay_lr_rate": 1e-3,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.99,
            "decay_mom_rate": 0.0,
        },
    },
    "amp": {"enabled": False},
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "run"},
    "csv_monitor": {"enabled": False},
    "wandb": {"enabled": False},
    "elasticity": {"enabled": False},
}
RANGE_TEST = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "scheduler": {
        "type": "LRRangeTest",
        "params": {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 200,
            "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": False,
        },
    },
}

SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("zero 1", ZERO_1, {"compute_dtype": "bf16", "train_micro_batch_size_per_gpu": 8, "steps_per_print": 2000}),
    ("zero 2, fp16", ZERO_2_FP16, {"compute_dtype": "fp16", "train_micro_batch_size_per_gpu": 16}),
    ("zero 2, offload", ZERO_2_OFFLOAD, {"train_batch_size": 32, "grad_accum_dtype": "fp32"}),
    ("zero 3, cpu", ZERO_3_CPU, {"train_batch_size": 8}),
    ("zero 3, nvme", ZERO_3_NVME, {"compute_dtype": "bf16"}),
    ("accelerate", ACCELERATE, {"train_batch_size": 2, "steps_per_print": None}),
    ("one cycle", ONE_CYCLE, {"compute_dtype": "fp32", "gradient_clipping": 1.0}),
    ("range test", RANGE_TEST, {"train_batch_size": 1}),
]
MOVED: dict[str, tuple[str, str, str]] = {
    "zero 1": ("device", "device", "device"),
    "zero 2, offload": ("device", "host", "host"),
    "zero 3, cpu": ("host", "host", "host"),
    "zero 3, nvme": ("nvme", "nvme", "host"),
    "accelerate": ("device", "device", "device"),
}


@pytest.mark.parametrize(("name", "config", "wanted"), SHAPES, ids=[name for name, _, _ in SHAPES])
def test_published_shapes_load_unchanged(name: str, config: dict[str, Any], wanted: dict[str, Any]) -> None:
    loaded = EngineConfig.load(config)
    assert {key: getattr(loaded, key) for key in wanted} == wanted
    placement = loaded.placement()
    assert (placement["param"], placement["exp_avg"], placement["grad"]) == MOVED.get(name, ("device",) * 3)


def test_a_published_nvme_config_lists_its_hints_once() -> None:
    hints = [hint.partition(":")[0] for hint in EngineConfig.load(ZERO_3_NVME).hints]
    assert len(hints) == len(set(hints))
    assert {"zero_optimization.offload_optimizer.pipeline_read", "zero_optimization.offload_param.buffer_size"} <= set(
        hints
    )
    assert "aio.thread_count" in hints
    assert "zero_optimization.stage3_prefetch_bucket_size" not in hints

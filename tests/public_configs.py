"""Configs in the shapes that people publish for DeepSpeed, at the size of the tests' small model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.05}}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 2, "initial_scale_power": 16, "hysteresis": 2}
BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8}
OFF = {
    **{
        key: {"enabled": False}
        for key in ("curriculum_learning", "autotuning", "elasticity", "data_efficiency", "compression_training")
    },
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
}
HF_ZERO_3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
TRAINER = {
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.01,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 3,
    "zero_optimization.reduce_bucket_size": 64 * 64,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
    "zero_optimization.stage3_param_persistence_threshold": 640,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
}
"""What transformers' Trainer writes in place of "auto"."""


def filled(config: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: filled(value, values, f"{prefix}{key}.")
        if isinstance(value, dict)
        else values[prefix + key]
        if value == "auto" and prefix + key in values
        else value
        for key, value in config.items()
    }


def nvme(stage_3: dict[str, Any] | None = None) -> dict[str, Any]:
    block = {"device": "nvme", "nvme_path": "NVME", "pin_memory": True, "buffer_count": 5}
    params = {**block, "buffer_size": 1e8, "max_in_cpu": 1e9}
    states = {**block, "fast_init": False, "pipeline_read": True, "pipeline_write": True}
    return {"stage": 3, "offload_param": params, "offload_optimizer": states, **(stage_3 or {})}


CONFIGS: dict[str, dict[str, Any]] = {
    "zero 1, bf16, warm-up": {
        "train_batch_size": 2,
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
        },
        "steps_per_print": 2000,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
    },
    "zero 2, fp16, dynamic scale": {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {**ADAMW, "params": {**ADAMW["params"], "torch_adam": True}},
        "fp16": FP16,
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, **BUCKETS},
        "zero_allow_untested_optimizer": True,
    },
    "zero 2, optimizer on the host, cosine": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1},
            **BUCKETS,
        },
    },
    "zero 3, all on the host": {
        "train_batch_size": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 3e-7}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            **BUCKETS,
        },
        **OFF,
    },
    "zero 3, nvme, bf16": {
        "train_batch_size": 2,
        "optimizer": ADAMW,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": nvme({"sub_group_size": 1e5, "stage3_prefetch_bucket_size": 0}),
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": False,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    },
    "zero 3, nvme, fp16, static scale": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAMW,
        "fp16": {"enabled": True, "loss_scale": 256},
        "zero_optimization": nvme(),
    },
    "trainer, zero 3": filled(HF_ZERO_3, {**TRAINER, "fp16.enabled": False, "bf16.enabled": True}),
    "trainer, zero 3, fp16": filled(HF_ZERO_3, {**TRAINER, "fp16.enabled": True, "bf16.enabled": False}),
    "accelerate, left on auto": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
        },
        "gradient_clipping": "auto",
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
    },
    "linear decay": {
        "train_batch_size": 2,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}},
        "zero_optimization": {"stage": 1},
    },
    "one cycle": {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "adam_w_mode": False}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 2,
                "cycle_first_stair_count": 2,
                "cycle_second_step_size": 2,
                "cycle_second_stair_count": 2,
                "decay_step_size": 1,
                "cycle_min_lr": 1e-4,
                "cycle_max_lr": 1e-3,
                "decay_lr_rate": 1e-3,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        },
        "amp": {"enabled": False},
        "csv_monitor": {"enabled": False},
        "wandb": {"enabled": False},
        "elasticity": {"enabled": False},
    },
    "range test with momentum": {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 1e-2,
                "lr_range_test_step_size": 2,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        },
    },
    "zero 0": {"train_batch_size": 2, "optimizer": ADAMW, "bf16": {"enabled": True}, "gradient_clipping": 0.1},
}


def placed(value: Any, folder: Path) -> Any:
    """The config with a folder for what lies on NVMe."""
    if isinstance(value, dict):
        return {key: placed(inner, folder) for key, inner in value.items()}
    return str(folder) if value == "NVME" else value

"""Combinations that cannot be, paths, and what the config says of itself. One test per case of kind E, and A-16."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lamina.aio_native import AsyncIO
from lamina.engine.config import AdamConfig, ConfigError, EngineConfig, TorchOptimizerConfig

ADAMW = {"type": "AdamW", "params": {"lr": 5e-7}}


def problems(config: Any, **arguments: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(config, **arguments)
    return dict(caught.value.problems)


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "set one of them to false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
            '"cpu" needs zero_optimization.stage 1, 2 or 3, which is 0',
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            '"cpu" needs zero_optimization.stage 3, which is 2',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "give zero_optimization.offload_param.nvme_path or tiers.nvme",
        ),
        (
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}},
                "tiers": {"nvme": ["/b"]},
            },
            "zero_optimization.offload_param.nvme_path",
            "/a is not among the folders of tiers.nvme (/b)",
        ),
        ({"tiers": {"nvme": ["/a", {"path": "/a/../a"}]}}, "tiers.nvme", "/a twice"),
        (
            {"tiers": {"placement": {"param": "nvme"}}, "zero_optimization": {"stage": 3}},
            "tiers.placement",
            "no folder is named: give tiers.nvme",
        ),
        (
            {"tiers": {"placement": {"param": "host"}}, "zero_optimization": {"stage": 2}},
            "tiers.placement",
            "needs zero_optimization.stage 3; it is 2",
        ),
        ({"tiers": {"placement": {"exp_avg": {"host": 0.5, "device": 0.4}}}}, "tiers.placement", "sum to 0.9, want 1"),
        ({"tiers": {"placement": {"moments": "host"}}}, "tiers.placement", "no plane 'moments'"),
        ({"tiers": {"placement": {"grad": "disk"}}}, "tiers.placement", "puts grad on 'disk'"),
        ({"tiers": {"job": "../up"}}, "tiers.job", "folder name"),
        ({"tiers": {"generations": 4}}, "tiers.generations", "at most 3, got 4"),
        ({"aio": {"use_gds": True}}, "aio.use_gds", "write false"),
        ({"aio": {"block_size": 7}}, "aio.block_size", "want a multiple of 4096, got 7"),
        ({"aio": {"block_size": 5000}}, "aio.block_size", "want a multiple of 4096, got 5000"),
        ({"aio": {"block_size": "2GiB"}}, "aio.block_size", "at most 1073741824"),
        ({"aio": {"queue_depth": 1e9}}, "aio.queue_depth", "at most 4096"),
        ({"aio": {"intra_op_parallelism": 1025}}, "aio.intra_op_parallelism", "at most 1024"),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 8, "initial_scale_power": 2}},
            "fp16.min_loss_scale",
            "above the first scale 2^2 = 4",
        ),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "at least 0"),
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis", "at least 1"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "computed in fp32"),
        ({"gradient_clipping": -1}, "gradient_clipping", "at least 0"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
            "optimizer.params.betas",
            "less than 1, got 1",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "optimizer.params.betas",
            "two numbers, got [0.9]",
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1.0}}}, "optimizer.params.lr", "at least 0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            'write type "Adam"',
        ),
        (
            {
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
            },
            "zero_optimization.offload_optimizer.device",
            "the state of SGD stays on device or host",
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, "optimizer.params.momentun", "params.momentum?"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 10}}},
            "scheduler.params.total_num_steps",
            "5 is less than warmup_num_steps 10",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1, "warmup_max_lr": 0.5}}},
            "scheduler.params.warmup_min_lr",
            "above warmup_max_lr 0.5",
        ),
        ({"scheduler": {"type": "CosineAnnealingLR"}}, "scheduler.type", "passed as lr_scheduler="),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}},
            "scheduler.params.total_num_steps",
            "does not belong to this type",
        ),
        ({"scheduler": {"params": {}}}, "scheduler.type", "is required"),
        ({"zero_optimization": True}, "zero_optimization", "want a block {...}, got true"),
        ({"optimizer": "AdamW"}, "optimizer", "want a block"),
    ],
)
def test_what_cannot_be(config: dict[str, Any], path: str, message: str) -> None:
    found = problems(config)
    assert list(found) == [path]
    assert message in found[path]


def test_all_combinations_are_told_at_once() -> None:
    found = problems(
        {
            "train_batch_size": 7,
            "gradient_accumulation_steps": 2,
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}, "overlap": True},
            "optimizer": {"type": "AdamX"},
        }
    )
    assert set(found) == {
        "train_batch_size",
        "bf16.enabled",
        "zero_optimization.offload_param.device",
        "zero_optimization.overlap",
        "optimizer.type",
    }


def test_nothing_is_concluded_from_a_faulty_key() -> None:
    # With the stage unknown, neither "offload needs stage 3" nor its contrary can be said.
    found = problems({"zero_optimization": {"stage": "three", "offload_param": {"device": "cpu"}}})
    assert list(found) == ["zero_optimization.stage"]
    found = problems({"train_batch_size": "many", "train_micro_batch_size_per_gpu": 3})
    assert list(found) == ["train_batch_size"]


def test_e01_duplicate_keys_are_errors_with_their_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"train_batch_size": 8, "aio": {"queue_depth": 1, "queue_depth": 2}, "train_batch_size": 4, "x": 1}'
    )
    found = problems(path)
    assert list(found) == ["train_batch_size", "aio.queue_depth", "x"]
    assert "given twice" in found["aio.queue_depth"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', "line 2, column 7"),
        ("", "line 1, column 1"),
        ("[1]", "want a JSON object"),
        ("# hjson\n{a: 1}", "line 1, column 1"),
        ('{"gradient_clipping": NaN}', "a finite number, got nan"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_files_are_told_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.load(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        EngineConfig.load(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        EngineConfig.load(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        EngineConfig.load(tmp_path / "latin.json")
    with pytest.raises(ConfigError, match="want a path or a mapping, got list"):
        EngineConfig.load([])  # type: ignore[arg-type]
    assert "keys are strings" in problems({"aio": {1: 2}})["aio"]
    assert "at least 1" in problems({}, world_size=0)["world_size"]


HF = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ARGUMENTS = {
    "learning_rate": 3e-5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.01,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "bf16": True,
    "fp16": False,
    "warmup_steps": 0,
    "warmup_ratio": 0.1,
    "max_steps": -1,
    "num_training_steps": 155,
    "hidden_size": 64,
    "output_dir": "anything else that a trainer has",
}


def test_e03_a_wrapper_config_is_resolved_from_arguments_and_shown() -> None:
    config = EngineConfig.load(HF, world_size=2, resolve=ARGUMENTS)
    effective = config.effective()
    assert effective["train_batch_size"] == 16
    assert effective["optimizer"]["params"]["lr"] == 3e-5
    assert effective["optimizer"]["params"]["betas"] == [0.8, 0.99]
    assert effective["optimizer"]["params"]["eps"] == 1e-7
    assert effective["optimizer"]["params"]["weight_decay"] == 0.01
    assert effective["gradient_clipping"] == 0.5
    assert effective["bf16"]["enabled"] is True
    assert effective["scheduler"]["params"] == {
        "total_num_steps": 155,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-5,
        "warmup_num_steps": 16,
        "warmup_type": "log",
    }
    assert effective["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert effective["zero_optimization"]["stage3_prefetch_bucket_size"] == 3686
    assert effective["zero_optimization"]["stage3_param_persistence_threshold"] == 640
    lines = {line.split()[0]: line for line in str(config).splitlines()}
    assert lines["optimizer.params.lr"].endswith("auto, from learning_rate")
    assert lines["zero_optimization.reduce_bucket_size"].endswith("auto, from hidden_size^2")
    assert lines["scheduler.params.warmup_min_lr"].endswith("auto, the default")
    assert lines["train_batch_size"].endswith("auto, derived")
    assert lines["zero_optimization.stage"].endswith("given")
    assert lines["steps_per_print"].endswith("default")


def test_e03_without_arguments_defaults_are_taken_and_the_rest_is_named() -> None:
    assert list(problems(HF)) == ["scheduler.params.total_num_steps"]
    config = EngineConfig.load(HF, resolve={"scheduler.params.total_num_steps": 2000, "warmup_steps": 7})
    assert isinstance(config.optimizer, AdamConfig)
    assert config.optimizer.params.lr == 1e-3
    assert config.compute_dtype == "fp32"
    assert config.scheduler is not None
    assert config.scheduler.params.model_dump()["warmup_num_steps"] == 7


def test_resolved_values_are_checked_like_given_ones() -> None:
    found = problems(HF, resolve={**ARGUMENTS, "learning_rate": "fast", "fp16": True, "optimiser.params.lr": 1})
    assert "got 'fast'" in found["optimizer.params.lr"]
    assert "fp16.enabled is true as well" in found["bf16.enabled"]
    assert "did you mean optimizer.params.lr?" in found["resolve['optimiser.params.lr']"]


def test_e08_the_peak_of_the_schedule_is_not_taken_from_a_default() -> None:
    config = EngineConfig.load({"optimizer": ADAMW, "scheduler": {"type": "WarmupLR"}})
    assert config.scheduler is not None
    assert config.scheduler.params.model_dump()["warmup_max_lr"] is None
    told = EngineConfig.load(
        {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}
    ).hints
    assert any("peak 0.001 is used, not optimizer.params.lr 5e-07" in hint for hint in told)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("Adam", AdamConfig),
        ("adamw", AdamConfig),
        ("sgd", TorchOptimizerConfig),
        ("RMSprop", TorchOptimizerConfig),
    ],
)
def test_e09_optimizer_names(kind: str, wanted: type) -> None:
    config = EngineConfig.load({"optimizer": {"type": kind, "params": {"lr": 0.1}}})
    assert type(config.optimizer) is wanted


@pytest.mark.parametrize("adam_w_mode", [None, True, False])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_e09_adam_decays_as_the_dialect_says(kind: str, adam_w_mode: bool | None) -> None:
    params = {} if adam_w_mode is None else {"adam_w_mode": adam_w_mode}
    if kind == "AdamW" and adam_w_mode is False:
        return
    optimizer = EngineConfig.load({"optimizer": {"type": kind, "params": params}}).optimizer
    assert isinstance(optimizer, AdamConfig)
    assert optimizer.adamw_mode is (adam_w_mode is not False)


def test_e09_names_that_do_not_exist_or_are_not_offered() -> None:
    assert "did you mean AdamW?" in problems({"optimizer": {"type": "AdamWW"}})["optimizer.type"]
    assert "write Adam or AdamW" in problems({"optimizer": {"type": "OneBitAdam"}})["optimizer.type"]
    assert "is required" in problems({"optimizer": {}})["optimizer.type"]
    assert "(int)" in problems({"optimizer": {"type": 3}})["optimizer.type"]
    assert EngineConfig.load({}).optimizer is None


def test_a16_paths_are_made_absolute_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = EngineConfig.load({"tiers": {"nvme": ["a b/ü", {"path": "../x", "bytes": "1GB"}, "~/swap"]}})
    monkeypatch.chdir("/")
    here = os.path.realpath(tmp_path)
    assert [(entry.path, entry.bytes) for entry in config.nvme_paths] == [
        (f"{here}/a b/ü", None),
        (f"{os.path.dirname(here)}/x", 10**9),
        ("/home/somebody/swap", None),
    ]
    # Read anew from elsewhere, for another number of ranks, the folders are the same.
    assert EngineConfig.load(config, world_size=2).nvme_paths == config.nvme_paths
    assert "want a path" in problems({"tiers": {"nvme": [""]}})["tiers.nvme[0]"]
    assert "want a path" in problems({"zero_optimization": {"offload_param": {"nvme_path": 3}}}).popitem()[1]


def test_folders_of_the_offload_blocks_serve_when_tiers_names_none() -> None:
    offload = {"device": "nvme", "nvme_path": "/a"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": {**offload, "nvme_path": "/b"}}
    assert [entry.path for entry in EngineConfig.load({"zero_optimization": zero}).nvme_paths] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        (
            {"tiers": {"nvme": ["/a"], "placement": {"exp_avg": {"host": 0.5, "nvme": 0.5}, "exp_avg_sq": "host"}}},
            "tiers.placement",
            "on 0.5 host, 0.5 nvme and on host",
        ),
        (
            {"tiers": {"nvme": ["/a"], "placement": {"grad": {"host": 0.5, "nvme": 0.5}}}},
            "tiers.placement",
            "gives grad shares of tiers",
        ),
        (
            {"tiers": {"nvme": ["/a"], "placement": {"exp_avg": "host", "exp_avg_sq": "nvme"}}},
            "tiers.placement",
            "on host and on nvme",
        ),
        ({"communication_data_type": "fp32", "bf16": {"enabled": True}}, "communication_data_type", 'write "bf16"'),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}, "tiers": {"lookahead": 3}},
            "zero_optimization.stage3_prefetch_bucket_size",
            "tiers.lookahead is 3",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write(config: dict[str, Any], path: str, message: str) -> None:
    if "tiers" in config:
        config = {"zero_optimization": {"stage": 3}, **config}
    found = problems(config)
    assert list(found) == [path]
    assert message in found[path]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, {"param": "device", "exp_avg": "device", "grad": "device"}),
        ({"tiers": {"host_bytes": "1GB"}}, {"param": "auto", "exp_avg": "auto", "grad": "auto"}),
        (
            {"tiers": {"host_bytes": "1GB"}, "zero_optimization": {"stage": 2}},
            {"param": "device", "exp_avg": "auto", "grad": "auto"},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            {"param": "device", "exp_avg": "host", "grad": "host"},
        ),
        (
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
                "tiers": {"nvme": ["/a"], "placement": {"exp_avg": "host"}},
            },
            {"param": "device", "exp_avg": "host", "exp_avg_sq": "auto", "grad": "auto"},
        ),
    ],
)
def test_placement_follows_what_was_asked_for(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    placement = EngineConfig.load(config).placement()
    assert {plane: placement[plane] for plane in wanted} == wanted  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 7}}, "no effect below"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/a"}}}, "no effect while"),
        ({"tiers": {"placement": {"master": "device"}}}, "does not have"),
        ({"tiers": {}, "zero_optimization": {"stage": 0}}, "nothing leaves device memory"),
        (
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
                "tiers": {"placement": {"param": "device"}},
            },
            "decides where param lies",
        ),
    ],
)
def test_options_without_effect_are_listed(config: dict[str, Any], message: str) -> None:
    loaded = EngineConfig.load(config)
    assert any(message in hint for hint in loaded.hints), loaded.hints
    assert all(hint in str(loaded) for hint in loaded.hints)


def test_gradient_clipping_is_one_when_absent_and_that_is_shown() -> None:
    config = EngineConfig.load({})
    (line,) = [line for line in config.describe().splitlines() if "gradient_clipping" in line]
    assert line.split() == ["gradient_clipping", "1.0", "default"]


def test_the_effective_config_reads_back_to_itself() -> None:
    config = EngineConfig.load(HF, world_size=2, resolve=ARGUMENTS)
    again = EngineConfig.load(json.loads(json.dumps(config.effective())), world_size=2)
    assert again.effective() == config.effective()


def test_the_callers_mapping_is_left_alone() -> None:
    before = json.dumps(HF)
    EngineConfig.load(HF, resolve=ARGUMENTS)
    assert json.dumps(HF) == before


def test_a_config_cannot_be_changed() -> None:
    config = EngineConfig.load({})
    with pytest.raises(ValueError, match="frozen"):
        config.gradient_clipping = 2.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.tiers.generations = 1  # type: ignore[misc]


def test_the_limits_of_aio_are_those_of_the_io_engine_and_come_together() -> None:
    found = problems({"aio": {"block_size": 7, "queue_depth": 10**9, "intra_op_parallelism": 10**6}, "x": 1})
    assert set(found) == {"aio.block_size", "aio.queue_depth", "aio.intra_op_parallelism", "x"}
    most = EngineConfig.load({"aio": {"block_size": 2**30, "queue_depth": 4096, "intra_op_parallelism": 1024}}).aio
    for key, value in (("queue_depth", most.queue_depth), ("num_threads", most.intra_op_parallelism)):
        with pytest.raises(ValueError, match=f"to {value}, not"):
            AsyncIO(**{key: value + 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"to {most.block_size}, not"):
        AsyncIO(block_bytes=2 * most.block_size)

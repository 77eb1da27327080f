"""No key of the config is read and then dropped: what each one does when training (and A-16: folders)."""

import argparse
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings

from lamina.engine import ConfigError, initialize
from lamina.engine.config import KEYS, Status
from lamina.tiers import PlacementError

SMALL = {"width": 16, "hidden": 32, "blocks": 2}


def train(count: int = 2, **changes: Any) -> Any:
    engine = initialize(build(**SMALL), config=settings(**changes))[0]
    with engine:
        for index in range(count * engine.config.gradient_accumulation_steps):
            engine.backward(engine(*batch(index)))
            engine.step()
    return engine


def test_progress_lines_and_breakdowns(capsys: pytest.CaptureFixture[str]) -> None:
    train(4)
    assert capsys.readouterr().out == ""
    train(4, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[::3]] == ["step=2", "step=4"]
    assert "loss=" in lines[0]
    assert "lr=[0.001]" in lines[0]
    assert lines[1].startswith("  time: forward ")
    assert lines[2].startswith("  peak bytes: device ")
    train(1, memory_breakdown=True)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_dump_state_prints_config_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    train(0, dump_state=True)
    out = capsys.readouterr().out
    assert "effective config" in out
    assert "updates run in place in memory" in out


def test_csv_and_json_monitors_write_every_step(tmp_path: Path) -> None:
    blocks = {
        name: {"enabled": True, "output_path": str(tmp_path), "job_name": name}
        for name in ("csv_monitor", "json_monitor")
    }
    engine = train(3, gradient_accumulation_steps=2, **blocks)
    records = [json.loads(line) for line in (tmp_path / "json_monitor" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["samples"] for record in records] == [4, 8, 12]
    model = build(**SMALL)
    first = (model(*batch(0)).item() + model(*batch(1)).item()) / 2
    assert records[0]["loss"] == pytest.approx(first, rel=1e-6)
    assert records[-1]["grad_norm"] == engine.metrics().grad_norm
    lines = (tmp_path / "csv_monitor" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert lines[0] == "step,train_loss"
    assert [line.split(",")[0] for line in lines[1:]] == ["4", "8", "12"]
    assert float(lines[1].split(",")[1]) == records[0]["loss"]


def test_monitors_that_cannot_write_are_told_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocks = {
        name: {"enabled": True, "output_path": str(tmp_path / "file")} for name in ("csv_monitor", "json_monitor")
    }
    with pytest.raises(ConfigError) as caught:
        train(**blocks)
    assert [path for path, _ in caught.value.problems] == ["csv_monitor.output_path", "json_monitor.output_path"]


def test_tensorboard_needs_its_package(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path)}
    try:
        import tensorboard  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"tensorboard\.enabled: is true, but tensorboard is not installed"):
            train(tensorboard=block)
    else:
        train(tensorboard=block)
        assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_tensorboard_gets_every_figure_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package's writer replaced by one that only notes down what it is told."""
    told: list[tuple[str, float, int]] = []
    opened: list[str] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            opened.append(folder)

        def add_scalar(self, name: str, value: float, samples: int) -> None:
            told.append((name, value, samples))

        def close(self) -> None:
            opened.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = settings(gradient_accumulation_steps=2, tensorboard=block)
    with initialize(build(**SMALL), config=config)[0] as engine:
        losses = []
        for index in range(6):
            loss = engine(*batch(index))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norm = engine.metrics().grad_norm
    assert opened == [str(tmp_path / "run"), "closed"]
    found = {(name, samples): value for name, value, samples in told}
    means = [(losses[2 * step] + losses[2 * step + 1]) / 2 for step in range(3)]
    assert [found["Train/Samples/train_loss", samples] for samples in (4, 8, 12)] == pytest.approx(means)
    assert found["Train/Samples/lr", 12] == 1e-3
    assert found["Train/Step/grad_norm", 12] == norm
    assert found["Train/Step/peak_bytes/device", 4] > 0


def test_a_prefetch_size_of_0_switches_the_look_ahead_off(tmp_path: Path) -> None:
    for size, wanted in ((0, 0), (1000, 64)):
        config = settings(**on_nvme(tmp_path))
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = size
        with initialize(build(**SMALL), config=config)[0] as engine:
            assert engine.runtime.executor.lookahead == wanted


def test_io_settings_reach_the_io(tmp_path: Path) -> None:
    aio = {"block_size": 65536, "queue_depth": 5, "intra_op_parallelism": 11}
    config = settings(aio=aio, **on_nvme(tmp_path, io_backend="threads"))
    with initialize(build(**SMALL), config=config)[0] as engine:
        assert (engine.runtime.io.config.queue_depth, engine.runtime.io.config.num_threads) == (5, 11)
        assert engine.runtime.io.backend == "threads"


def test_every_key_without_an_effect_says_so() -> None:
    """Keys that are listed as implemented and are looked at by nothing in the engine's sources would be silent."""
    sources = "\n".join(
        path.read_text()
        for path in (Path(__file__).parents[2] / "engine").rglob("*.py")
        if path.parent.name not in ("config", "planner") or path.name in ("engine_config.py", "checks.py")
    )
    silent = [
        key.path
        for key in KEYS.values()
        if key.status is Status.IMPLEMENTED and not key.is_block and f".{key.path.rpartition('.')[2]}" not in sources
        if not key.path.startswith(("optimizer.params.", "scheduler.params."))
    ]
    assert silent == []


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def homes(**keys: Any) -> set[tuple[str, str]]:
    segments = train(0, **zero(**keys)).runtime.segments
    return {(str(s.param_tier), str(s.state_tier)) for s in segments}


def nvme_paths(**keys: Any) -> list[str]:
    return [Path(entry.path).name for entry in train(0, **zero(**keys)).runtime.options.nvme]


def sub_group(**keys: Any) -> int:
    config = settings(**zero(**keys))
    with initialize(build(width=512, hidden=2048, blocks=1), config=config)[0] as engine:
        return int(engine.runtime.placement.sub_group_numel)


def whole_ones(**keys: Any) -> list[str]:
    """Parameters that compute can use at once although the others are on nvme."""
    nvme = {"offload_param": {"device": "nvme", "nvme_path": "here"}}
    segments = train(0, **zero(**nvme, **keys)).runtime.segments
    return [slot.name for s in segments if s.in_place for slot in s.layout.slots]


class Mixed(torch.nn.Module):
    """Nothing in it is a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(128, 128)
        self.experts = torch.nn.ModuleDict({"a": torch.nn.Linear(128, 128), "b": torch.nn.Linear(128, 128)})


def groups(**leaf_module: list[str]) -> list[str]:
    with initialize(Mixed(), config=settings(**zero(leaf_module=leaf_module)))[0] as engine:
        return [group.name for group in engine.runtime.groups]


def unused(**keys: Any) -> str:
    """The error of a step in which only one of two layers was used."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
    model.forward = lambda x: model["used"](x).sum()
    with initialize(model, config=settings(**zero(**keys)))[0] as engine:
        engine.backward(engine(torch.ones(2, 4)))
        try:
            engine.step()
        except RuntimeError as error:
            return str(error)
    return ""


def shares(**keys: Any) -> dict[str, float]:
    """Of the optimizer state, on each tier."""
    with initialize(build(), config=settings(**zero(**keys)))[0] as engine:
        return {tier: round(share, 3) for tier, share in engine.plan.shares["optimizer state"].items()}


NVME = {"device": "nvme", "nvme_path": "here"}
LEAF = ["(root)", "experts"]
ZERO_KEYS: dict[str, tuple[Callable[[], Any], Any]] = {
    "stage": (lambda: [train(0, **zero(stage=s)).runtime.options.stage for s in range(4)], [0, 1, 2, 3]),
    "offload_param.device": (lambda: homes(offload_param={"device": "cpu"}), {("host", "device")}),
    "offload_param.nvme_path": (lambda: nvme_paths(offload_param=NVME), ["here"]),
    "offload_optimizer.device": (lambda: homes(offload_optimizer={"device": "cpu"}), {("device", "host")}),
    "offload_optimizer.nvme_path": (lambda: nvme_paths(offload_optimizer=NVME), ["here"]),
    "offload_optimizer.ratio": (
        lambda: shares(offload_optimizer=NVME | {"ratio": 0.75}),
        {"device": 0.25, "nvme": 0.75},
    ),
    "sub_group_size": (  # without it: the whole of the largest segment
        lambda: [sub_group(offload_optimizer=NVME, **more) for more in ({}, {"sub_group_size": 1 << 20})],
        [2_100_736, 1 << 20],
    ),
    "stage3_prefetch_bucket_size": (
        lambda: train(0, **zero(stage3_prefetch_bucket_size=0)).runtime.executor.lookahead,
        0,
    ),
    "stage3_param_persistence_threshold": (
        lambda: [whole_ones(), whole_ones(stage3_param_persistence_threshold=16)],
        [[], [f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "norm.bias", "down.bias")]],
    ),
    "stage3_model_persistence_threshold": (
        lambda: whole_ones(stage3_param_persistence_threshold=16, stage3_model_persistence_threshold=40),
        ["blocks.0.norm.weight", "blocks.0.norm.bias"],
    ),
    "leaf_module.classes": (lambda: [groups(), groups(classes=["ModuleDict"])], [["(root)"], LEAF]),
    "leaf_module.names": (lambda: groups(names=["experts"]), LEAF),
    "leaf_module.name_suffixes": (lambda: groups(name_suffixes=["experts"]), LEAF),
    "ignore_unused_parameters": (
        lambda: [unused(), unused(ignore_unused_parameters=False)[:43]],
        ["", "no gradient for unused.weight, unused.bias "],
    ),
}


@pytest.mark.parametrize("key", ZERO_KEYS)
def test_every_key_of_zero_optimization_does_what_it_says(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    observe, wanted = ZERO_KEYS[key]
    assert observe() == wanted


def test_no_key_of_zero_optimization_is_left_out_of_the_table() -> None:
    path = "zero_optimization."
    listed = {
        key.path.removeprefix(path)
        for key in KEYS.values()
        if key.status is Status.IMPLEMENTED and not key.is_block and key.path.startswith(path)
    }
    assert listed == set(ZERO_KEYS)


def test_small_parameters_that_do_not_fit_are_refused_with_their_key(tmp_path: Path) -> None:
    zero_block = zero(offload_param={"device": "nvme"}, stage3_param_persistence_threshold=10**6)
    with pytest.raises(PlacementError, match=r"stay whole in device memory for their size .*persistence_threshold"):
        train(0, **zero_block, tiers={"nvme": [str(tmp_path)], "device_bytes": 8192})


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a16_folders_are_made_or_refused_by_key_path_and_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "new folder" / "Größe"
    config = settings(**on_nvme(made))
    with initialize(build(**SMALL), config=config)[0]:
        assert made.is_dir()
    monkeypatch.chdir(tmp_path)
    with initialize(build(**SMALL), config=settings(**on_nvme("relative")))[0] as engine:
        monkeypatch.chdir("/")
        assert (tmp_path / "relative").is_dir()
        engine.backward(engine(*batch(0)))
        engine.step()
    (tmp_path / "file").write_text("")
    two = settings(**on_nvme("x"))
    two["tiers"]["nvme"] = [str(tmp_path / "file"), str(tmp_path / "file" / "below"), str(tmp_path)]
    with pytest.raises(ConfigError) as caught:
        initialize(build(**SMALL), config=two)
    found = dict(caught.value.problems)
    assert list(found) == ["tiers.nvme[0].path", "tiers.nvme[1].path"]
    assert all("is not a directory (user" in message for message in found.values())
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "file")}
    zero = {"stage": 3, "offload_optimizer": offload}
    with pytest.raises(ConfigError, match=r"offload_optimizer\.nvme_path: .*file is not a directory"):
        initialize(build(**SMALL), config=settings(zero_optimization=zero))
    with pytest.raises(ConfigError, match="no folder is named"):
        initialize(build(**SMALL), config=settings(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a16_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        initialize(build(**SMALL), config=settings(**on_nvme(tmp_path)))


# -- DeepSpeed's arguments ---------------------------------------------------------------------------------------------


def test_the_config_may_come_in_deepspeeds_ways(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings()))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    model = build(**SMALL)
    with initialize(args=args, model=model, model_parameters=model.parameters())[0] as engine:
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.gradient_accumulation_steps() == 1
        assert engine.zero_optimization_stage() == 3
        assert list(engine.parameters())
        assert engine.blocks is model.blocks  # what the engine lacks is the module's
        with pytest.raises(AttributeError, match="neither the engine nor its SmallModel has an attribute 'nothing'"):
            _ = engine.nothing
    with initialize(model=build(**SMALL), config_params=settings(), dist_init_required=False)[0]:
        pass
    with pytest.raises(ConfigError, match=r"given as config and args\.deepspeed_config"):
        initialize(args=args, model=model, config=settings())
    with pytest.raises(ConfigError, match="is missing"):
        initialize(model=model)
    with pytest.raises(ValueError, match="mpu: model-parallel units"):
        initialize(model=model, config=settings(), mpu=object())
    with pytest.raises(ValueError, match="start with torchrun"):
        initialize(model=model, config=settings(), dist_init_required=True)
    with pytest.raises(TypeError, match="passed as args="):
        initialize(args, config=settings())


PUBLIC: dict[str, dict[str, Any]] = {
    "zero 1, bf16": {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_partitions": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    },
    "zero 2, fp16, offload": {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 8,
            "hysteresis": 2,
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-3}},
    },
    "zero 3, nvme": {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**6,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "PATH", "buffer_count": 4, "pipeline_read": True},
            "offload_param": {"device": "nvme", "nvme_path": "PATH", "buffer_count": 5, "buffer_size": 1e8},
            "stage3_max_live_parameters": 1e9,
            "stage3_prefetch_bucket_size": 5e7,
            "sub_group_size": 1e9,
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_configs_in_published_shapes_train_as_the_plain_placement_does(name: str, tmp_path: Path) -> None:
    def run(zero: dict[str, Any]) -> list[float]:
        config = json.loads(json.dumps(PUBLIC[name]).replace("PATH", str(tmp_path)))
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
        config["zero_optimization"] |= zero
        engine = initialize(build(**SMALL), config=config)[0]
        losses = []
        with engine:
            for index in range(4 * engine.gradient_accumulation_steps()):
                loss = engine(*batch(index))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return losses

    plain = run({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}})
    assert run({}) == plain
    assert len(set(plain)) == len(plain)
    assert all(torch.isfinite(torch.tensor(plain)))

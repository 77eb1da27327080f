"""Checkpoints: 5 steps, a new engine, 5 more are bit-equal to 10 straight ones, from any placement into any other (D-02)."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small_model import build, differences, on_nvme, settings, train_steps

from lamina.engine import initialize
from lamina.tiers.memory.gpu import Accelerator
from lamina.zero import get_full

SMALL = {"width": 32, "hidden": 64, "blocks": 3}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "memory": {},
    "nvme": {},
    "parameters in memory": {"param": "none"},
    "state on the host": {"optimizer": "cpu"},
}


def config_for(placement: str, path: Path, **changes: Any) -> dict[str, Any]:
    if placement == "memory":
        return settings(**changes)
    return settings(**changes, **on_nvme(path, **PLACEMENTS[placement]))


def state_of(engine: Any) -> list[torch.Tensor]:
    found = []
    for parameter in engine.module.parameters():
        found += [get_full(parameter, plane) for plane in ("master", "exp_avg", "exp_avg_sq")]
    return found


def straight(config: dict[str, Any], count: int) -> tuple[list[float], list[torch.Tensor]]:
    engine, _, _, _ = initialize(build(**SMALL), config=config)
    with engine:
        return train_steps(engine, 0, count), state_of(engine)


def resumed(
    before: dict[str, Any], after: dict[str, Any], folder: Path, at: int, count: int
) -> tuple[list[float], list[torch.Tensor], Any]:
    engine, _, _, _ = initialize(build(**SMALL), config=before)
    with engine:
        losses = train_steps(engine, 0, at)
        engine.save_checkpoint(folder)
    torch.manual_seed(99)
    other = build(**SMALL)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)  # nothing of the new model's own values may survive
    engine, _, _, _ = initialize(other, config=after)
    with engine:
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        assert client == {}
        losses += train_steps(engine, at, count)
        return losses, state_of(engine), engine.load_report


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nvme", "nvme"),
        ("memory", "memory"),
        ("memory", "nvme"),
        ("nvme", "memory"),
        ("parameters in memory", "state on the host"),
        ("state on the host", "parameters in memory"),
    ],
)
def test_d02_resuming_is_bit_equal_to_training_straight(
    precision: str, before: str, after: str, tmp_path: Path
) -> None:
    common = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        common["fp16"]["initial_scale_power"] = 10
    reference = straight(config_for("memory", tmp_path / "n", **common), 6)
    losses, state, report = resumed(
        config_for(before, tmp_path / "a", **common),
        config_for(after, tmp_path / "b", **common),
        tmp_path / "checkpoints",
        3,
        6,
    )
    assert list(differences((losses, state), reference)) == []
    assert report.as_saved == (before == after)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_d02_another_sub_group_size_stage_and_order_of_tiers(precision: str, tmp_path: Path) -> None:
    common = {} if precision == "fp32" else {precision: {"enabled": True}}
    reference = straight(settings(**common), 6)
    before = config_for("nvme", tmp_path / "a", **common)
    before["zero_optimization"]["sub_group_size"] = 1000
    after = settings(**common, zero_optimization={"stage": 1})
    losses, state, _ = resumed(before, after, tmp_path / "c", 3, 6)
    assert list(differences((losses, state), reference)) == []


@pytest.mark.parametrize("placement", ["memory", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_d02_an_open_window_is_carried_over(placement: str, precision: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"gradient_accumulation_steps": 4}
    if precision != "fp32":
        common[precision] = {"enabled": True}
    reference = straight(config_for("memory", tmp_path / "n", **common), 12)
    losses, state, _ = resumed(
        config_for(placement, tmp_path / "a", **common),
        config_for("memory", tmp_path / "b", **common),
        tmp_path / "c",
        6,
        12,
    )
    assert list(differences((losses, state), reference)) == []


def test_random_states_go_on(tmp_path: Path) -> None:
    engine, _, _, _ = initialize(build(**SMALL), config=settings())
    with engine:
        train_steps(engine, 0, 1)
        torch.manual_seed(5)
        random.seed(6)
        numpy.random.seed(7)
        engine.save_checkpoint(tmp_path)
        wanted = (torch.rand(3).tolist(), random.random(), numpy.random.rand(), numpy.random.randn())
        torch.rand(9), random.random(), numpy.random.rand()
        engine.load_checkpoint(tmp_path)
        assert (torch.rand(3).tolist(), random.random(), numpy.random.rand(), numpy.random.randn()) == wanted


def test_weights_only_leaves_optimizer_counts_and_schedule_alone(tmp_path: Path) -> None:
    with initialize(build(**SMALL), config=settings())[0] as engine:
        train_steps(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        masters = [get_full(parameter, "master") for parameter in engine.module.parameters()]
    with initialize(build(**SMALL), config=config_for("nvme", tmp_path / "n"))[0] as engine:
        train_steps(engine, 5, 7)
        moments = [get_full(parameter, "exp_avg") for parameter in engine.module.parameters()]
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.global_steps == 2
        for parameter, master, moment in zip(engine.module.parameters(), masters, moments, strict=True):
            assert torch.equal(get_full(parameter, "master"), master)
            assert torch.equal(get_full(parameter, "exp_avg"), moment)


def test_strict_names_parameters_that_are_only_here_or_there(tmp_path: Path) -> None:
    with initialize(build(**SMALL), config=settings())[0] as engine:
        train_steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        embedding = get_full(engine.module.embed.weight, "master")
    untied = {**SMALL, "tied": False}
    with initialize(build(**untied), config=config_for("nvme", tmp_path / "n"))[0] as engine:
        head = get_full(engine.module.head.weight, "master")
        with pytest.raises(KeyError, match=r"not in the checkpoint: head\.weight"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, strict=False)
        assert engine.load_report.missing == ("head.weight",)
        assert torch.equal(get_full(engine.module.head.weight, "master"), head)
        assert torch.equal(get_full(engine.module.embed.weight, "master"), embedding)
    narrow = initialize(build(width=16, hidden=64, blocks=3), config=settings())[0]
    wanted = r"embed\.weight has shape \(256, 16\) here and \(256, 32\) there"
    with narrow, pytest.raises(ValueError, match=wanted):
        narrow.load_checkpoint(tmp_path)


def test_without_latest_nothing_is_loaded_and_a_missing_tag_is_named(tmp_path: Path) -> None:
    with initialize(build(**SMALL), config=settings())[0] as engine:
        with pytest.warns(UserWarning, match=r"nothing was loaded.*nothing has no file 'latest'"):
            assert engine.load_checkpoint(tmp_path / "nothing") == (None, {})
        engine.save_checkpoint(tmp_path, tag="one")
        with pytest.raises(FileNotFoundError, match=r"two holds no complete checkpoint; in .* there are: one"):
            engine.load_checkpoint(tmp_path, tag="two")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("placement", ["memory", "nvme", "parameters in memory", "state on the host"])
def test_with_device_memory_apart_from_the_hosts(
    placement: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's memory, played by ordinary memory: into it, within it and out of it again."""
    common: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        common["fp16"]["initial_scale_power"] = 10
    reference = straight(config_for("memory", tmp_path / "n", **common), 6)
    with initialize(build(**SMALL), config=config_for(placement, tmp_path / "x", **common))[0] as engine:
        losses = train_steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr("lamina.engine.zero_options._accelerator", lambda: Accelerator(torch.device("cpu")))
        for first in (2, 3):
            with initialize(build(**SMALL), config=config_for(placement, tmp_path / "y", **common))[0] as engine:
                assert engine.runtime.options.accelerator is not None
                engine.load_checkpoint(tmp_path / "c")
                losses += train_steps(engine, first, first + 1)
                engine.save_checkpoint(tmp_path / "c")
    with initialize(build(**SMALL), config=config_for(placement, tmp_path / "z", **common))[0] as engine:
        engine.load_checkpoint(tmp_path / "c")
        losses += train_steps(engine, 4, 6)
        assert list(differences((losses, state_of(engine)), reference)) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clients_optimizer_with_device_memory_apart(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    config = settings(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, **common)
    found = []
    for apart in (False, True):
        with monkeypatch.context() as patched:
            if apart:
                patched.setattr("lamina.engine.zero_options._accelerator", lambda: Accelerator(torch.device("cpu")))
            with initialize(build(**SMALL), config=config)[0] as engine:
                losses = train_steps(engine, 0, 4)
                found.append((losses, [get_full(p, "master") for p in engine.module.parameters()]))
    assert list(differences(*found)) == []

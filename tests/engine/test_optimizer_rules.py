"""Optimizers: param groups with rates of their own, torch's optimizers on state in memory, and the rules (C-17, E-09)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import SmallModel, batch, build, on_nvme, settings

from lamina.engine import ConfigError, initialize
from lamina.zero import get_full

SMALL = {"width": 32, "hidden": 64, "blocks": 2}


def without_optimizer(**changes: Any) -> dict[str, Any]:
    config = settings(**changes)
    del config["optimizer"]
    return config


def train(engine: Any, first: int = 0, last: int = 4) -> list[torch.Tensor]:
    for index in range(first, last):
        engine.backward(engine(*batch(index)))
        engine.step()
    return [get_full(parameter, "master") for parameter in engine.module.parameters()]


def train_plain(make: Callable[[SmallModel], torch.optim.Optimizer], schedule: Any = None) -> list[torch.Tensor]:
    model = build(**SMALL)
    optimizer = make(model)
    schedule = schedule(optimizer) if schedule else None
    for index in range(4):
        model(*batch(index)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def three_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Rates 1e-2, 1e-3 and 0, decay 0.1, 0 and 0.1."""
    params = list(model.parameters())
    return [
        {"params": params[0::3], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[1::3], "lr": 1e-3, "weight_decay": 0.0},
        {"params": params[2::3], "lr": 0.0, "weight_decay": 0.1},
    ]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "multi-step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[1, 3]),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 1e-3, 1e-4], total_steps=6),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("where", ["memory", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c17_param_groups_match_torch_under_every_schedule(schedule: str, where: str, tmp_path: Path) -> None:
    make = SCHEDULES[schedule]
    extra = on_nvme(tmp_path) if where == "nvme" else {}
    model = build(**SMALL)
    client = torch.optim.AdamW(three_groups(model), fused=True)
    engine, optimizer, _, scheduler = initialize(
        model, optimizer=client, config=without_optimizer(**extra), lr_scheduler=make
    )
    with engine:
        ours = train(engine)
        assert [group["lr"] for group in optimizer.param_groups] == engine.get_lr()
        assert (scheduler is None) == (make is None)
    theirs = train_plain(lambda model: torch.optim.AdamW(three_groups(model), fused=True), make)
    assert all(map(torch.equal, ours, theirs))


def test_a_schedule_made_on_the_clients_optimizer_changes_the_rates_in_use() -> None:
    model = build(**SMALL)
    client = torch.optim.AdamW(three_groups(model), fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, 0.5)
    engine, _, _, _ = initialize(model, optimizer=client, lr_scheduler=schedule, config=without_optimizer())
    with engine:
        ours = train(engine)
        assert engine.get_lr() == [1e-2 / 16, 1e-3 / 16, 0.0]
    theirs = train_plain(
        lambda model: torch.optim.AdamW(three_groups(model), fused=True),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert all(map(torch.equal, ours, theirs))


def test_c17_groups_survive_a_checkpoint_and_a_rate_changed_by_hand(tmp_path: Path) -> None:
    def fresh() -> Any:
        model = build(**SMALL)
        config = settings(**on_nvme(tmp_path / "n"))
        return initialize(model, model_parameters=three_groups(model), config=config)[0]

    with fresh() as engine:
        train(engine, 0, 2)
        engine.optimizer.param_groups[2]["lr"] = 5e-3
        engine.save_checkpoint(tmp_path / "c")
        straight = train(engine, 2, 4)
    with fresh() as engine:
        engine.load_checkpoint(tmp_path / "c")
        assert engine.get_lr() == [1e-2, 1e-3, 5e-3]
        assert all(map(torch.equal, train(engine, 2, 4), straight))


CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001}),
}


@pytest.mark.parametrize("given", ["config", "argument"])
@pytest.mark.parametrize("name", CLASSES)
def test_optimizers_of_torch_equal_plain_torch(name: str, given: str) -> None:
    kind, params = CLASSES[name]
    model = build(**SMALL)
    if given == "config":
        config = settings(optimizer={"type": name, "params": params})
        engine, optimizer, _, _ = initialize(model, config=config)
    else:
        client = kind(model.parameters(), **params)
        engine, optimizer, _, _ = initialize(model, optimizer=client, config=without_optimizer())
        assert optimizer is client
    assert isinstance(optimizer, kind)
    with engine:
        ours = train(engine)
    theirs = train_plain(lambda model: kind(model.parameters(), **params))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_a_clients_optimizer_are_fp32(precision: str) -> None:
    """Against a loop that keeps fp32 masters by hand."""
    common: dict[str, Any] = {precision: {"enabled": True}}
    if precision == "fp16":
        common[precision]["loss_scale"] = 1.0
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    with initialize(build(**SMALL), config=settings(optimizer=optimizer, **common))[0] as engine:
        ours = train(engine)
        low = [get_full(parameter) for parameter in engine.module.parameters()]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model = build(**SMALL)
    masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.to(dtype)
    reference = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for index in range(4):
        model(*batch(index)).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        reference.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master.detach())
    assert all(torch.equal(a, b.detach()) for a, b in zip(ours, masters, strict=True))
    assert all(torch.equal(a, b.detach()) for a, b in zip(low, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clients_optimizer_resumes_bit_exactly(precision: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    config = settings(optimizer={"type": "NAdam", "params": {"lr": 1e-3}}, **common)
    with initialize(build(**SMALL), config=config)[0] as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        straight = train(engine, 2, 4)
    with initialize(build(**SMALL), config=config)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert all(map(torch.equal, train(engine, 2, 4), straight))


class Custom(torch.optim.SGD):
    """A class of somebody else's."""


def test_e09_each_case_has_its_rule(tmp_path: Path) -> None:
    model = build(**SMALL)
    both = {"optimizer": torch.optim.AdamW(model.parameters()), "config": settings()}
    with pytest.raises(ConfigError, match="keep one of the two"):
        initialize(model, **both)
    for placed in ({"param": "none"}, {"optimizer": "cpu"}):
        config = without_optimizer(**on_nvme(tmp_path, **placed))
        with pytest.raises(ConfigError, match="with another optimizer everything stays in memory"):
            initialize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer: is false, and optimizer is Custom"):
        initialize(model, optimizer=Custom(model.parameters(), lr=0.1), config=without_optimizer())
    with pytest.raises(TypeError, match="LBFGS"):
        initialize(model, optimizer=torch.optim.LBFGS(model.parameters()), config=without_optimizer())
    with pytest.raises(ConfigError, match=r"optimizer\.params: torch\.optim\.SGD refuses them"):
        initialize(model, config=settings(optimizer={"type": "SGD", "params": {"lr": -1.0}}))
    allowed = without_optimizer(zero_allow_untested_optimizer=True)
    with initialize(model, optimizer=Custom(model.parameters(), lr=0.1), config=allowed)[0] as engine:
        train(engine, 0, 1)
    model = build(**SMALL)
    with initialize(model, config=without_optimizer())[0] as engine:  # forward only
        loss = engine(*batch(0))
        with pytest.raises(RuntimeError, match="backward needs an optimizer"):
            engine.backward(loss)


def test_an_optimizer_and_a_schedule_may_be_callables() -> None:
    model = build(**SMALL)
    engine, optimizer, _, _ = initialize(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        config=without_optimizer(),
    )
    with engine:
        train(engine, 0, 2)
        assert optimizer.param_groups[0]["lr"] == engine.get_lr()[0] == 0.025

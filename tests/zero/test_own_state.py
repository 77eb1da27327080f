"""What an optimizer of torch keeps for itself counts against the host budget, found out before its first step."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import PlacementError
from lamina.tiers.placement.needs import OWN_GRADIENTS, OWN_STATE
from lamina.zero.groups.partition import FlatLayout
from lamina.zero.groups.segment import Segment
from lamina.zero.homes.fitting import segment_size
from lamina.zero.homes.own_state import OwnState
from lamina.zero.options import ZeroOptions


class Net(nn.Module):
    """Matrices, a 4-d kernel, vectors, a single element and none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.kernel = nn.Conv2d(1, 3, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.zeros(0, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.kernel(x[:, None]).square().mean() + self.none.sum()) * self.scale


class Looks(torch.optim.Optimizer):
    """Looks at values, and keeps a whole copy, rows, a flat copy and a list of tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if float(p.grad.abs().sum()) >= 0 and not state:
                    state["copy"] = torch.zeros_like(p, dtype=torch.float64)
                    state["rows"] = torch.zeros(p.shape[:1])
                    state["flat"] = torch.zeros(p.numel(), dtype=torch.uint8)
                    state["list"] = [torch.zeros(1), {"inner": torch.zeros(p.shape[-1:])}]
                p.sub_(p.grad, alpha=0.1)


class Odd(Looks):
    """Keeps what has nothing to do with the parameter's shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("odd", torch.zeros(1000 + int(p.grad.numel())))


CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda params: torch.optim.Adafactor([p for p in params if p.numel()]),  # it divides by the length
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop centred": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "two groups": lambda params: torch.optim.SGD(
        [{"params": params[:3], "momentum": 0.9}, {"params": params[3:], "momentum": 0.0}], lr=0.1
    ),
    "some parameters": lambda params: torch.optim.SGD(params[:4], lr=0.1, momentum=0.9),
    "looks": Looks,
}


def start(make: Callable[[Any], torch.optim.Optimizer], *, precision: str = "fp32", **tiers: Any) -> TrainingEngine:
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "tiers": tiers,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return initialize(model, optimizer=make(list(model.parameters())), config=config)[0]


def train(engine: TrainingEngine, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens).float())
        engine.step()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def kept(engine: TrainingEngine) -> int:
    """Bytes of the optimizer's tensors as they are."""
    optimizer: Any = engine.optimizer
    return sum(t.numel() * t.itemsize for state in optimizer.optimizer.state.values() for t in tensors_in(dict(state)))


def items(engine: TrainingEngine) -> dict[str, int]:
    found: dict[str, int] = engine.plan.placement["tiers"]["host"]["items"]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_item_is_what_the_optimizer_then_keeps(name: str, precision: str) -> None:
    with start(CLASSES[name], precision=precision) as engine:
        assert engine.runtime.residence.own_state.unknown == ""
        train(engine, 3)
        assert items(engine).get(OWN_STATE, 0) == kept(engine)
        numel = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])  # type: ignore[union-attr]
        assert items(engine).get(OWN_GRADIENTS, 0) == (4 * numel if precision == "bf16" else 0)


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 0), ("bf16", 4)])
def test_no_room_is_set_aside_for_the_state_that_lamina_s_own_adam_would_have(precision: str, itemsize: int) -> None:
    with start(CLASSES["SGD"], precision=precision) as engine:
        sizes = engine.runtime.residence.sizes
        assert [size.state_itemsizes for size in sizes] == [(itemsize,) if itemsize else ()] * len(sizes)
        numel = sum(segment.layout.shard_numel for segment in engine.runtime.segments)
        state = engine.plan.placement["tiers"]["device"]["items"].get("optimizer state", 0)
        assert itemsize * numel <= state <= itemsize * numel + 4096 * len(sizes) * bool(itemsize)


def test_the_budget_holds_it_or_initialize_refuses_with_the_sum() -> None:
    with start(CLASSES["SGD momentum"]) as engine:
        own, needed = items(engine)[OWN_STATE], sum(items(engine).values())
    assert own == 4 * (50 * 24 + 3 * (24 * 24 + 24) + 3 * 4 + 3 + 1)
    with pytest.raises(PlacementError) as refusal:
        start(CLASSES["SGD momentum"], host_bytes=needed - 1)
    told = str(refusal.value)
    assert f"{OWN_STATE} {own:,}" in told
    least = re.search(rf"tiers\.host_bytes is {needed - 1:,}, but at least ([\d,]+) are needed", told)
    assert least is not None, told
    start(CLASSES["SGD momentum"], host_bytes=int(least[1].replace(",", ""))).close()
    with start(CLASSES["SGD momentum"], host_bytes=needed) as engine:
        train(engine, 2)
        assert engine.runtime.host.nbytes == needed - own  # what the arena has, the optimizer cannot
        assert engine.metrics().peak_bytes["host"] <= needed
    with start(CLASSES["SGD"], host_bytes=needed - own) as engine:  # without momentum there is nothing to keep
        train(engine, 2)


def test_a_trial_step_takes_no_memory_and_leaves_no_trace() -> None:
    parameter = nn.Parameter(torch.empty(10**6, 10**6, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    before, groups = torch.get_rng_state(), [dict(group) for group in optimizer.param_groups]
    assert OwnState(optimizer).nbytes(parameter, parameter.shape) == 4 * 10**12
    assert called == []
    assert not optimizer.state
    assert optimizer.param_groups == groups
    assert not getattr(optimizer, "_opt_called", False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_schedule_on_the_optimizer_counts_its_real_steps_only() -> None:
    with start(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)) as engine:
        optimizer: Any = engine.optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=2, gamma=0.5)
        for _ in range(2):
            train(engine, 1)
            schedule.step()
        assert engine.get_lr() == [0.05]


def test_what_cannot_be_found_out_is_said_and_not_guessed() -> None:
    with pytest.warns(UserWarning, match=r"host_bytes does not cover .*it made a tensor of shape \[1\d\d\d\]"):
        engine = start(Odd, host_bytes=1 << 20)
    with engine:
        assert OWN_STATE not in items(engine)
        assert re.search(
            r"outside the budgets: what the optimizer keeps for itself \(a trial step of Odd", str(engine.plan)
        )
        train(engine, 2)
    with start(Odd) as engine:  # without a budget nothing is promised
        assert "outside the budgets" in str(engine.plan)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_state_as_they_share_the_masters(world_size: int) -> None:
    shapes = [("a", (7, 9)), ("b", (0, 8)), ("c", (100,)), ("d", ())]
    parameters = [nn.Parameter(torch.zeros(shape)) for _, shape in shapes]
    optimizer = torch.optim.RMSprop(parameters, momentum=0.9)  # two copies and a count
    own, ranks, total = OwnState(optimizer), [], 0
    for rank in range(world_size):
        segment = Segment(
            name="s",
            group=0,
            layout=FlatLayout.of(shapes, world_size),
            parameters=parameters,
            dtype=torch.float32,
            trainable=True,
            rank=rank,
            client=True,
        )
        size = segment_size(segment, ZeroOptions(client=optimizer), _Ranks(world_size), own)  # type: ignore[arg-type]
        ranks.append(size.own_state_bytes)
        total += len(segment.layout.pieces(rank)) + (world_size == 1)  # the empty one is whole on one rank
    assert sum(ranks) == 8 * (63 + 100 + 1) + 4 * total


class _Ranks:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

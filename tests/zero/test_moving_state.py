"""Segments change their homes while training goes on: the same bits as without, memory given back, failures without harm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import Choice, Home, Placement, PlacementQuestion, Tier
from lamina.zero import get_full, set_full

MIB = 1 << 20
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


@pytest.fixture(autouse=True)
def _homes_as_budgets_suggest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the disk was measured to do, and the steps to take, a test knows what it moves."""

    def given(question: PlacementQuestion) -> Choice:
        return Choice.given(question, question.place())

    monkeypatch.setattr("lamina.zero.homes.choosing.choose", given)
    monkeypatch.setattr("lamina.engine.steering.Steering.after_step", lambda *_: None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.out = nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.out(x).square().mean()


def start(path: Path, **settings: Any) -> TrainingEngine:
    torch.manual_seed(0)
    tiers = {"nvme": [str(path)], "device_bytes": MIB, "host_bytes": 2 * MIB} | settings.pop("tiers", {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "tiers": tiers,
    }
    return initialize(Net(), config=config | settings)[0]


def placed(engine: TrainingEngine, homes: Mapping[int, tuple[Tier, Tier] | Home]) -> Placement:
    """The present placement with some segments (by number) elsewhere."""
    runtime = engine.runtime
    choice = runtime.decision.choice
    assert choice is not None
    wanted = dict(runtime.placement.homes)
    for index, home in homes.items():
        whole = home if isinstance(home, Home) else Home(param=home[0], state=home[1])
        wanted[runtime.segments[index].name] = whole
    return choice.question.placement_at(wanted)


def train(engine: TrainingEngine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(step))
        loss = engine(x.to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: TrainingEngine) -> list[torch.Tensor]:
    planes = [get_full(p, plane) for p in engine.module.parameters() for plane in ("master", "exp_avg", "exp_avg_sq")]
    return [plane for plane in planes if plane is not None]


def assert_goes_on(engine: TrainingEngine, saved: str, losses: list[float], ends: list[torch.Tensor]) -> None:
    """From a checkpoint, with these losses to these masters."""
    engine.load_checkpoint(saved)
    first = engine.global_steps
    assert train(engine, first, first + len(losses)) == losses
    assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


def start_on_nvme(path: Path, **settings: Any) -> TrainingEngine:
    """Budgets that leave most of the optimizer state on NVMe."""
    tiers = {
        "host_bytes": 200_000,
        "device_bytes": settings.pop("device_bytes", 60_000),
        "keep_state": settings.pop("keep_state", False),
    }
    return start(path, tiers=tiers, **settings)


def reference(tmp_path: Path, steps: int, **settings: Any) -> tuple[list[float], list[torch.Tensor]]:
    with start_on_nvme(tmp_path / "reference", **settings) as engine:
        return train(engine, 0, steps), masters(engine)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_state_comes_and_goes_bit_for_bit(tmp_path: Path, bf16: bool, clipping: float) -> None:
    settings = {"bf16": {"enabled": bf16}, "gradient_clipping": clipping}
    losses, ends = reference(tmp_path, 12, **settings)
    with start_on_nvme(tmp_path / "moved", **settings) as engine:
        runtime = engine.runtime
        kept = [(s.param_tier, s.state_tier) for s in runtime.segments]
        found = train(engine, 0, 2)
        on_nvme = [index for index, s in enumerate(runtime.segments) if s.state_tier is NVME]
        in_memory = [index for index, s in enumerate(runtime.segments) if s.state_tier is not NVME]
        assert on_nvme
        first = on_nvme[0]
        swap = {first: (HOST, HOST)} | dict.fromkeys(in_memory[:1], (NVME, NVME))
        target = placed(engine, swap)
        assert runtime.migration.obstacle(target) is None
        runtime.migration.begin(target)
        found += train(engine, 2, 5)
        assert not runtime.migration.under_way
        assert (runtime.segments[first].param_tier, runtime.segments[first].state_tier) == (HOST, HOST)
        assert runtime.segments[first].name not in [shard.name for shard in runtime.store.shards]  # type: ignore[union-attr]
        assert runtime.host.used <= runtime.host.nbytes
        back = placed(engine, {index: kept[index] for index in swap})
        assert runtime.migration.obstacle(back) is None
        runtime.migration.begin(back)
        found += train(engine, 5, 12)
        assert [(s.param_tier, s.state_tier) for s in runtime.segments] == kept
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


def swap(engine: TrainingEngine) -> Placement:
    """The first segment whose state is on NVMe changes places with the first one whose state is in memory."""
    segments = engine.runtime.segments
    goes = next(index for index, s in enumerate(segments) if s.state_tier is not NVME)
    comes = next(index for index, s in enumerate(segments) if s.state_tier is NVME)
    return placed(engine, {comes: (HOST, HOST), goes: (NVME, NVME)})


def test_a_step_that_fails_puts_the_move_off(tmp_path: Path) -> None:
    losses, ends = reference(tmp_path, 6)
    with start_on_nvme(tmp_path / "moved") as engine:
        runtime = engine.runtime
        found = train(engine, 0, 2)
        target = swap(engine)
        runtime.migration.begin(target)
        before = runtime.store.shards  # type: ignore[union-attr]
        engine.backward(engine(torch.ones(3, 48)))
        engine.zero_grad()  # updates that were started early are dropped, and with them the generation
        assert runtime.store.shards == before  # type: ignore[union-attr]
        assert runtime.migration.under_way
        found += train(engine, 2, 6)
        assert not runtime.migration.under_way
        assert runtime.placement is target
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


@pytest.mark.parametrize("steps_after", [0, 1, 2])
def test_a_checkpoint_of_any_moment_of_a_move_loads_bit_for_bit(tmp_path: Path, steps_after: int) -> None:
    losses, ends = reference(tmp_path, 8)
    with start_on_nvme(tmp_path / "moved") as engine:
        train(engine, 0, 2)
        engine.runtime.migration.begin(swap(engine))
        train(engine, 2, 2 + steps_after)
        saved = str(tmp_path / "saved")
        engine.save_checkpoint(saved)
        train(engine, 2 + steps_after, 5)
        assert_goes_on(engine, saved, losses[2 + steps_after :], ends)
    with start_on_nvme(tmp_path / "another") as engine:
        assert_goes_on(engine, saved, losses[2 + steps_after :], ends)


def test_parameters_alone_move_to_where_their_state_is_and_back(tmp_path: Path) -> None:
    losses, _ = reference(tmp_path, 8)
    with start_on_nvme(tmp_path / "moved") as engine:
        runtime = engine.runtime
        found = train(engine, 0, 2)
        last = len(runtime.segments) - 1
        assert (runtime.segments[last].param_tier, runtime.segments[last].state_tier) == (DEVICE, NVME)
        target = placed(engine, {last: (NVME, NVME)})
        assert runtime.migration.obstacle(target) is None
        runtime.migration.begin(target)
        found += train(engine, 2, 5)
        assert not runtime.segments[last].in_place
        runtime.migration.begin(placed(engine, {last: (DEVICE, NVME)}))
        found += train(engine, 5, 8)
        assert runtime.segments[last].in_place
        assert found == losses


def test_what_cannot_move_is_told(tmp_path: Path) -> None:
    with start_on_nvme(tmp_path / "a") as engine:
        everything = placed(engine, dict.fromkeys(range(4), (HOST, HOST)))
        assert "it " in str(engine.runtime.migration.obstacle(everything))
        most = placed(engine, dict.fromkeys(range(3), (DEVICE, HOST)))
        assert "no hole of the host tier" in str(engine.runtime.migration.obstacle(most))
    with start(tmp_path / "b", tiers={"host_bytes": 8 * MIB}) as engine:
        assert "nothing was measured" in str(engine.runtime.migration.obstacle(engine.runtime.placement))


def test_parameters_cross_from_one_memory_to_the_other_with_their_state_in_memory(tmp_path: Path) -> None:
    losses, ends = reference(tmp_path, 10)
    with start_on_nvme(tmp_path / "moved") as engine:
        runtime = engine.runtime
        found = train(engine, 0, 2)
        in_memory = [index for index, s in enumerate(runtime.segments) if s.state_tier is not NVME]
        one = in_memory[0]
        first = (runtime.segments[one].param_tier, runtime.segments[one].state_tier)
        assert first == (DEVICE, HOST)
        for home in ((HOST, HOST), first):
            target = placed(engine, {one: home})
            assert runtime.migration.obstacle(target) is None
            runtime.migration.begin(target)
            found += train(engine, len(found), len(found) + 2)
            assert (runtime.segments[one].param_tier, runtime.segments[one].state_tier) == home
            assert runtime.segments[one].in_place
        found += train(engine, len(found), 10)
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


def test_kept_state_may_go_to_nvme_and_never_into_memory(tmp_path: Path) -> None:
    losses, ends = reference(tmp_path, 8, keep_state=True)
    with start_on_nvme(tmp_path / "moved", keep_state=True) as engine:
        runtime = engine.runtime
        found = train(engine, 0, 2)
        comes = next(index for index, s in enumerate(runtime.segments) if s.state_tier is NVME)
        refusal = runtime.migration.obstacle(placed(engine, {comes: (HOST, HOST)}))
        assert "where a later process would not find it (tiers.keep_state)" in str(refusal)
        target = placed(engine, dict.fromkeys(range(len(runtime.segments)), (HOST, NVME)))
        assert runtime.migration.obstacle(target) is None
        runtime.migration.begin(target)
        found += train(engine, 2, 8)
        assert {(s.param_tier, s.state_tier) for s in runtime.segments} == {(HOST, NVME)}
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


# -- divided states --------------------------------------------------------------------------------------------------------


def part(kept: int, *, param: Tier = DEVICE, kept_on: Tier = HOST) -> Home:
    return Home(param=param, state=NVME, kept=kept, kept_on=kept_on)


def move(engine: TrainingEngine, homes: Mapping[int, tuple[Tier, Tier] | Home]) -> None:
    """Begin to move there."""
    target = placed(engine, homes)
    assert engine.runtime.migration.obstacle(target) is None
    engine.runtime.migration.begin(target)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_divided_state_changes_in_every_way_bit_for_bit(tmp_path: Path, bf16: bool, clipping: float) -> None:
    settings = {"bf16": {"enabled": bf16}, "gradient_clipping": clipping}
    ways = [
        (DEVICE, NVME),
        part(512),
        part(1024),
        part(32, param=HOST),
        (HOST, HOST),
        part(2000, param=HOST),
        part(2000, kept_on=DEVICE),
        part(2000),
        (NVME, NVME),
        part(96),
        (DEVICE, DEVICE),
        (DEVICE, HOST),
        (DEVICE, NVME),
    ]
    losses, ends = reference(tmp_path, 2 * len(ways), **settings)
    with start_on_nvme(tmp_path / "moved", device_bytes=80_000, **settings) as engine:
        runtime = engine.runtime
        found: list[float] = []
        others = dict.fromkeys(range(1, len(runtime.segments)), (NVME, NVME))
        for home in ways:
            move(engine, {0: home, **others})
            found += train(engine, len(found), len(found) + 2)
            segment = runtime.segments[0]
            now = home if isinstance(home, Home) else Home(param=home[0], state=home[1])
            assert not runtime.migration.under_way
            assert (segment.param_tier, segment.state_tier, segment.kept) == (now.param, now.state, now.kept)
            numel = now.kept or (segment.layout.shard_numel if now.state is not NVME else 0)
            assert [block.nbytes for block in segment.state.values()] == [
                numel * spec.itemsize for spec in segment.planes[1:] if numel
            ]
            shards = {shard.name: shard.numel for shard in runtime.store.shards}  # type: ignore[union-attr]
            assert shards.get(segment.name, 0) == segment.layout.shard_numel - numel
            assert runtime.host.peak <= runtime.host.nbytes
            assert runtime.device.peak <= runtime.device.nbytes
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


@pytest.mark.parametrize("steps_after", [0, 1, 2])
def test_a_checkpoint_of_any_moment_of_a_division_loads_bit_for_bit(tmp_path: Path, steps_after: int) -> None:
    losses, ends = reference(tmp_path, 10)
    with start_on_nvme(tmp_path / "moved") as engine:
        move(engine, {0: part(640), 1: part(32)})
        train(engine, 0, 2)
        move(engine, {0: part(64), 1: (NVME, NVME)})
        train(engine, 2, 2 + steps_after)
        saved = str(tmp_path / "saved")
        engine.save_checkpoint(saved)
        train(engine, 2 + steps_after, 5)
        assert_goes_on(engine, saved, losses[2 + steps_after :], ends)
    with start_on_nvme(tmp_path / "another") as engine:
        assert_goes_on(engine, saved, losses[2 + steps_after :], ends)


def test_a_division_that_fails_is_put_off_and_one_that_has_no_room_given_up(tmp_path: Path) -> None:
    losses, ends = reference(tmp_path, 10)
    with start_on_nvme(tmp_path / "moved") as engine:
        runtime = engine.runtime
        move(engine, {0: part(640)})
        found = train(engine, 0, 2)
        move(engine, {0: part(64)})
        before = runtime.store.shards  # type: ignore[union-attr]
        engine.backward(engine(torch.ones(3, 48)))
        engine.zero_grad()
        assert runtime.store.shards == before  # type: ignore[union-attr]
        assert runtime.migration.under_way
        found += train(engine, 2, 4)
        assert runtime.segments[0].kept == 64
        move(engine, {0: part(640)})
        fillers = []
        while runtime.host.largest_hole:
            fillers.append(runtime.host.alloc(runtime.host.largest_hole, "somebody else", align=1))
        found += train(engine, 4, 6)
        assert not runtime.migration.under_way
        assert runtime.segments[0].kept == 64
        for filler in fillers:
            filler.free()
        move(engine, {0: part(640)})
        found += train(engine, 6, 10)
        assert runtime.segments[0].kept == 640
        assert found == losses
        assert all(torch.equal(left, right) for left, right in zip(masters(engine), ends, strict=True))


def test_planes_of_a_state_that_was_divided_while_training_are_read_and_written(tmp_path: Path) -> None:
    with start_on_nvme(tmp_path / "moved") as engine:
        move(engine, {0: part(640)})
        train(engine, 0, 2)
        parameter = engine.runtime.segments[0].parameters[0]
        for kept in (640, 64, 1280):
            move(engine, {0: part(kept)})
            train(engine, 2, 4)
            for plane in ("master", "exp_avg", "exp_avg_sq"):
                values = torch.rand(parameter.shape)
                set_full(parameter, plane, values)
                read = get_full(parameter, plane)
                assert read is not None
                assert torch.equal(read, values)

"""A share of the optimizer state in memory, the rest on NVMe: the same bits as with all of it in memory, whatever happens."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, differences, settings, train_steps, train_with_engine, train_with_torch

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import Choice, StoreError, Tier
from lamina.tiers.memory.gpu import Accelerator
from lamina.zero import get_full, get_local, set_full, set_local

SMALL = {"width": 32, "hidden": 64, "blocks": 3}
ODD = {"width": 13, "hidden": 29, "blocks": 3, "vocab": 101}
PLANES = {"fp32": ("exp_avg", "exp_avg_sq"), "bf16": ("remainder",), "fp16": ("master",)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared(
    path: Path, share: float, *, precision: str = "fp32", param: Any = "device", memory: str = "host", **changes: Any
) -> dict[str, Any]:
    """A config that keeps a share of the optimizer state in memory."""
    planes = {plane: {memory: share, "nvme": 1 - share} for plane in {*PLANES["fp32"], *PLANES[precision]}}
    tiers = {"nvme": [str(path)], "placement": {"param": param, **planes}, **changes.pop("tiers", {})}
    return settings(tiers=tiers, **formats(precision), **changes)


def formats(precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        found["fp16"]["initial_scale_power"] = 10
    return found


def divided(engine: TrainingEngine) -> list[Any]:
    return [segment for segment in engine.runtime.segments if segment.kept]


def state_of(engine: TrainingEngine) -> list[torch.Tensor]:
    planes = ("param", "master", "exp_avg", "exp_avg_sq")
    return [get_full(parameter, plane) for parameter in engine.module.parameters() for plane in planes]  # type: ignore[misc]


# -- the same numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"gradient_clipping": 0.05}, {"gradient_accumulation_steps": 3}])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_share_in_memory_changes_no_bit(precision: str, changes: dict[str, Any], tmp_path: Path) -> None:
    in_memory = train_with_engine(settings(**formats(precision), **changes), **SMALL)
    tiered = train_with_engine(shared(tmp_path, 0.4, precision=precision, **changes), **SMALL)
    assert list(differences(tiered, in_memory)) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("share", [0.02, 0.37, 0.98])
def test_any_share_has_the_numbers_of_plain_torch(share: float, tmp_path: Path) -> None:
    assert list(differences(train_with_engine(shared(tmp_path, share)), train_with_torch())) == []


@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.3, {"memory": "device"}),
        (
            0.45,
            {"tiers": {"host_bytes": 2_000_000}},
        ),  # early updates give gradients up, but that of the divided segment
        (0.55, {"param": "host"}),
        (0.55, {"tiers": {"generations": 1}}),
        (0.7, {"tiers": {"verify": "always"}}),
        (0.55, {"tiers": {"overlap_update": False}}),
        (0.6, {"param": "nvme"}),  # whole groups, since a group's parameters must be where its state is
        (0.5, {"param": {"device": 0.3, "nvme": 0.7}}),
    ],
)
def test_odd_lengths_and_other_ways_have_the_same_bits(share: float, changes: dict[str, Any], tmp_path: Path) -> None:
    config = shared(tmp_path, share, precision="bf16", **changes)
    in_memory = train_with_engine(settings(**formats("bf16")), **ODD)
    assert list(differences(train_with_engine(config, **ODD), in_memory)) == []


def test_small_sub_groups_begin_behind_what_is_kept(tmp_path: Path) -> None:
    wide = {"width": 512, "hidden": 2048, "blocks": 1}
    config = shared(tmp_path, 0.6, zero_optimization={"stage": 3, "sub_group_size": 600_000})
    with initialize(build(**wide), config=config)[0] as engine:
        (segment,) = divided(engine)
        assert segment.layout.shard_numel - segment.kept > engine.runtime.placement.sub_group_numel
    assert list(differences(train_with_engine(config, steps=2, **wide), train_with_torch(steps=2, **wide))) == []


@pytest.mark.parametrize("param", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_device_memory_apart_from_the_hosts(
    precision: str, param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = train_with_engine(settings(**formats(precision)), **SMALL)
    monkeypatch.setattr("lamina.engine.zero_options._accelerator", lambda: Accelerator(torch.device("cpu")))
    config = shared(
        tmp_path, 0.4, precision=precision, param=param, memory="device"
    )  # host: the update runs on the CPU
    with initialize(build(**SMALL), config=config)[0] as engine:
        assert [segment.kept_on for segment in divided(engine)] == [Tier.HOST]
    assert list(differences(train_with_engine(config, **SMALL), in_memory)) == []


def test_skipped_steps_change_no_bit(tmp_path: Path) -> None:
    config = shared(tmp_path, 0.4, precision="fp16")
    config["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1}
    with initialize(build(**SMALL), config=config)[0] as engine:
        before = state_of(engine)
        for index in range(3):
            train_steps(engine, index, index + 1)
            assert not engine.was_step_applied()
            assert all(map(torch.equal, state_of(engine), before))


# -- between backward and step ---------------------------------------------------------------------------------------------


def test_the_front_waits_for_the_step_while_the_rest_is_updated_early(tmp_path: Path) -> None:
    with initialize(build(), config=shared(tmp_path, 0.4))[0] as engine:
        before = state_of(engine)
        engine.backward(engine(*batch(0)))
        engine.runtime.updater.drain()
        (segment,) = divided(engine)
        assert engine.optimizer.started_early(segment)
        exp_avg = torch.frombuffer(segment.state["exp_avg"].view, dtype=torch.float32)
        assert exp_avg.abs().max() == 0
        assert all(map(torch.equal, state_of(engine), before))
        engine.zero_grad()  # and nothing of it has happened
        assert all(map(torch.equal, state_of(engine), before))
        assert train_steps(engine, 0, 3) == train_with_torch(steps=3)[0]


def test_a_rate_changed_and_a_gradient_edited_before_the_step_count(tmp_path: Path) -> None:
    outcomes = []
    for config in (settings(), shared(tmp_path, 0.4)):
        model = build()
        with initialize(model, config=config)[0] as engine:
            for index in range(3):
                engine.set_lr(0.5)
                engine.backward(engine(*batch(index)))
                engine.set_lr(1e-3)
                for factor, parameter in zip((0.0, 10.0), model.parameters(), strict=False):
                    set_full(parameter, "grad", get_full(parameter, "grad") * factor)  # type: ignore[operator]
                engine.step()
            outcomes.append(([engine.get_global_grad_norm()], state_of(engine)))
    assert list(differences(*outcomes)) == []


def test_planes_are_read_and_written_across_the_border(tmp_path: Path) -> None:
    with initialize(build(**SMALL), config=shared(tmp_path, 0.4, precision="bf16"))[0] as engine:
        train_steps(engine, 0, 2)
        (segment,) = divided(engine)
        slot = next(index for index, slot in enumerate(segment.layout.slots) if slot.offset < segment.kept < slot.end)
        across = segment.parameters[slot]
        for plane in ("master", "exp_avg", "exp_avg_sq"):
            values = torch.randn(across.shape)
            set_full(across, plane, values)
            assert torch.equal(get_full(across, plane), values)
            set_local(across, plane, 2 * values.reshape(-1))
            assert torch.equal(get_local(across, plane), 2 * values.reshape(-1))
        others = [parameter for parameter in engine.module.parameters() if parameter is not across]
        assert all(get_full(parameter, "exp_avg").abs().max() < 1 for parameter in others)
        assert torch.equal(across.detach(), get_full(across, "param"))
        train_steps(engine, 2, 3)


# -- budgets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.45, 0.8])
def test_the_share_is_met_and_the_budgets_that_it_needs_are_enough_and_all_that_is(
    share: float, tmp_path: Path
) -> None:
    free = shared(tmp_path, share, gradient_clipping=1.0)
    with initialize(build(), config=free)[0] as engine:
        runtime = engine.runtime
        met = engine.plan.shares["optimizer state"]
        numel = sum(segment.layout.shard_numel for segment in runtime.segments)
        assert met["host"] == pytest.approx(share, abs=32 / numel)
        needed = {tier: getattr(runtime.placement, f"{tier}_bytes") for tier in ("device", "host")}
        assert f"optimizer state: {share:.1%} on host, {1 - share:.1%} on nvme" in str(engine.plan)
    tight = {f"{tier}_bytes": nbytes for tier, nbytes in needed.items()}
    in_memory = train_with_engine(settings(gradient_clipping=1.0))
    exact = shared(tmp_path, share, gradient_clipping=1.0, tiers=tight)
    with initialize(build(), config=exact)[0] as engine:
        losses = train_steps(engine, 0, 4)
        for arena in (engine.runtime.host, engine.runtime.device):
            assert 0 <= needed[str(arena.tier)] - arena.peak < 20 * 4096, "planes are counted in whole pages"
    assert losses == in_memory[0]


def test_auto_fills_the_host_budget_to_within_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the usual order, whatever the disk was measured to do: others divide one segment on each tier of memory, or more."""
    monkeypatch.setattr("lamina.zero.homes.choosing.choose", lambda question: Choice.given(question, question.place()))
    wide = {"width": 512, "hidden": 2048, "blocks": 3}
    budget = 64 << 20
    config = settings(
        gradient_clipping=1.0, tiers={"nvme": [str(tmp_path)], "device_bytes": "26MiB", "host_bytes": budget}
    )
    with initialize(build(**wide), config=config)[0] as engine:
        (segment,) = divided(engine)
        runtime = engine.runtime
        chunk = runtime.options.wishes.chunk_numel
        assert segment.kept % chunk == 0
        assert budget - chunk * 8 - 3 * 4096 < runtime.placement.host_bytes <= budget
        assert f"but for {segment.kept / segment.layout.shard_numel:.0%} of it, which is on host" in str(engine.plan)
        losses = train_steps(engine, 0, 2)
        assert runtime.host.peak <= budget
    assert losses == train_with_engine(settings(gradient_clipping=1.0), steps=2, **wide)[0]


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def saved(config: dict[str, Any], folder: Path) -> None:
    with initialize(build(**SMALL), config=config)[0] as engine:
        train_steps(engine, 0, 2)
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_checkpoints_move_between_shares(precision: str, tmp_path: Path) -> None:
    ways = {
        "0.4": shared(tmp_path / "a", 0.4, precision=precision),
        "0.7": shared(tmp_path / "b", 0.7, precision=precision),
        "memory": settings(**formats(precision)),
        "nvme": shared(tmp_path / "c", 0.0, precision=precision),
    }
    with initialize(build(**SMALL), config=ways["memory"])[0] as engine:
        wanted = train_steps(engine, 0, 4), state_of(engine)
    for before, after in (
        ("0.4", "0.4"),
        ("0.4", "0.7"),
        ("0.7", "memory"),
        ("memory", "0.4"),
        ("nvme", "0.7"),
        ("0.7", "nvme"),
    ):
        folder = tmp_path / f"{before} to {after}"
        saved(ways[before], folder)
        torch.manual_seed(9)
        with initialize(build(**SMALL), config=ways[after])[0] as engine:
            engine.load_checkpoint(folder)
            assert engine.load_report.as_saved == (before == after)
            found = train_steps(engine, 2, 4)
            assert found == wanted[0][2:], (before, after)
            assert all(map(torch.equal, state_of(engine), wanted[1])), (before, after)


def test_a_damaged_front_is_told_and_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    config = shared(tmp_path / "n", 0.4)
    saved(config, tmp_path / "c")
    (file,) = (tmp_path / "c").rglob("planes.bin")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with initialize(build(**SMALL), config=config)[0] as engine, pytest.raises(Exception, match=r"planes\.bin"):
        engine.load_checkpoint(tmp_path / "c")


def test_state_that_only_memory_had_cannot_be_gone_on_with(tmp_path: Path) -> None:
    config = shared(tmp_path, 0.4, tiers={"keep_state": True})
    with initialize(build(**SMALL), config=config)[0] as engine:
        train_steps(engine, 0, 2)
    with pytest.raises(StoreError, match=r"is placed in memory, which did not survive"):
        initialize(build(**SMALL), config=config, resume=True)

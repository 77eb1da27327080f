"""Blocks that are computed again in the backward pass: the same bits as without, from inputs on any tier, in less memory."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_model import batch, differences, on_nvme, settings, train_with_engine
from torch import nn

from lamina.engine import ConfigError, initialize
from lamina.tiers import BudgetError, PlacementError, Tier
from lamina.zero import get_full

WHERE = ("device", "host", "nvme")


class DropoutBlock(nn.Module):
    """Saves much, draws random numbers, has a parameter of its own, and changes what it was given a view of in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.25, self.training)
        out = self.down(hidden) * self.gain * scale["by"]
        return out.add_(x), "a string beside it"


class DropoutModel(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 5, vocab: int = 256) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(DropoutBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        by = torch.full((1,), 0.5, dtype=x.dtype)
        for block in self.blocks:
            x, _ = block(x, scale={"by": by})
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def outcome(config: dict[str, Any], *, steps: int = 3, **shape: int) -> Any:
    torch.manual_seed(0)
    model = DropoutModel(**shape)
    torch.manual_seed(1)
    return train_with_engine(config, steps=steps, model=model)


def budgets(tmp_path: Path, name: str) -> dict[str, Any]:
    """Config blocks for state in memory, on NVMe, and under budgets that hold one small group at a time."""
    if name == "memory":
        return {"tiers": {"nvme": [str(tmp_path)], "placement": {"param": "device", "exp_avg": "host"}}}
    if name == "nvme":
        return on_nvme(tmp_path)
    return on_nvme(tmp_path, device_bytes=139_264, host_bytes=1_200_000, activation_bytes=100_000)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("state", ["memory", "nvme", "tight"])
def test_the_same_bits_from_inputs_on_any_tier(tmp_path: Path, where: str, state: str) -> None:
    plain = outcome(settings())
    blocks = budgets(tmp_path, state)
    blocks["tiers"]["activations"] = where
    assert not list(differences(plain, outcome(settings(**blocks))))


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_the_same_bits_in_bf16_with_accumulation(tmp_path: Path, where: str) -> None:
    common = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3}
    blocks = on_nvme(tmp_path, activations=where)
    assert not list(differences(outcome(settings(**common)), outcome(settings(**common, **blocks))))


def test_deepspeeds_key_keeps_inputs_in_host_memory() -> None:
    config = settings(activation_checkpointing={"cpu_checkpointing": True, "number_checkpoints": 5})
    with initialize(DropoutModel(), config=config)[0] as engine:
        assert len(engine.runtime.recomputed) == 5
        assert "5 blocks are computed again in the backward pass, their inputs wait on host" in str(engine.plan)
        engine.backward(engine(*batch(0)))
        assert engine.runtime.saved_inputs.file_bytes == 0
    assert not list(differences(outcome(settings()), outcome(config)))


def peak_of_tensors(step: Any) -> int:
    """The most bytes that torch's allocator had given out at once during a call, beyond those before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = most = 0
    results: Any = profile.profiler
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("where", WHERE)
def test_the_peak_falls(tmp_path: Path, where: str) -> None:
    peaks = []
    for activations in ("keep", where):
        config = settings(tiers={"nvme": [str(tmp_path)], "activations": activations, "placement": {"param": "device"}})
        with initialize(DropoutModel(width=64, blocks=8), config=config)[0] as engine:
            data = torch.zeros(8, 256, dtype=torch.long), torch.zeros(8, 256, dtype=torch.long)
            peaks.append(peak_of_tensors(lambda engine=engine, data=data: engine.backward(engine(*data))))
    stream = 8 * 256 * 64 * 4
    # A block keeps its input, the norm's output and three tensors of four times the width; then only its input, or nothing.
    saved = 7 * 14 * stream if where == "device" else 7 * 15 * stream
    assert peaks[0] - peaks[1] > 0.7 * saved


def test_inputs_leave_host_memory_for_the_file_and_come_back_ahead_of_use(tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path, activations="nvme", host_bytes=8_000_000, activation_bytes=40_000))
    with initialize(DropoutModel(blocks=12), config=config)[0] as engine:  # an input is 8,192 bytes
        reads = engine.runtime.io.stats().bytes_read
        loss = engine(*batch(0))
        held = engine.runtime.saved_inputs.room._arenas[0].used
        engine.backward(loss)
        assert held <= 3 * 8192
        assert engine.runtime.io.stats().bytes_read - reads > 9 * 8192
        assert engine.runtime.saved_inputs.room._arenas[0].used <= 2 * 8192  # writes that nobody waited for
        engine.step()
        assert engine.metrics().peak_bytes["nvme"] >= engine.runtime.placement.nvme_bytes + 12 * 8192
    assert list(tmp_path.iterdir()) == []


class PostNorm(nn.Module):
    """Its backward pass begins with an operation that takes a parameter before an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def post_norm(trained: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Sequential(*[PostNorm(64) for _ in range(3)]), nn.Linear(64, 1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("1") or trained in name)
    return model


@pytest.mark.parametrize("trained", ["", "bias", "nothing"])
def test_the_least_device_budget_that_is_named_holds_blocks_that_run_again(tmp_path: Path, trained: str) -> None:
    config = settings(**on_nvme(tmp_path, device_bytes=1, activations="device"))
    with pytest.raises(PlacementError, match="device_bytes is 1, but at least") as refused:
        initialize(post_norm(trained), config=config)
    config["tiers"]["device_bytes"] = refused.value.least[Tier.DEVICE]
    found = []
    for blocks in (config, settings()):
        model = post_norm(trained)
        with initialize(model, config=blocks)[0] as engine:
            for index in range(2):
                loss = engine(batch(index)[0]).square().mean()
                engine.backward(loss, retain_graph=True)
                engine.backward(loss)
                engine.step()
            found.append([get_full(parameter) for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize(
    ("host_bytes", "extra", "after"),
    [
        (1_200_000, {}, "saved inputs take"),
        (1_200_000, {"keep_state": True}, "state is moved for that"),
        (1_000_000, {}, "since gradients use the rest"),
    ],
    ids=["little left", "kept state", "gradients in a scratch file"],
)
def test_what_the_placement_leaves_is_enough_without_a_word_from_the_user(
    tmp_path: Path, where: str, host_bytes: int, extra: dict[str, Any], after: str
) -> None:
    clip = {"gradient_clipping": 1.0} if "gradients" in after else {}
    tiers = {"nvme": [str(tmp_path)], "activations": where, "host_bytes": host_bytes, "device_bytes": 300_000, **extra}
    config = settings(tiers=tiers, **clip)
    torch.manual_seed(0)
    model = DropoutModel()
    with initialize(model, config=config)[0] as engine:
        torch.manual_seed(1)
        assert "nothing is set aside for them (tiers.activation_bytes is not given)" in str(engine.plan)
        losses = []
        for index in range(4):
            losses.append(engine(*batch(index)))
            engine.backward(losses[-1])
            engine.step()
            assert engine.metrics().peak_bytes["host"] <= host_bytes
        told = str(engine.plan)
        assert after in told
        wanted = 5 * 8192 if where == "host" else 3 * 8192
        assert f"they take up to {wanted:,} bytes of host memory" in told
        if "moved" in after:
            assert engine.plan.placement["tiers"]["host"]["items"]["saved inputs"] == wanted
            assert "went straight to nvme" in told
            before = engine.runtime.saved_inputs._without_room.now
            loss = engine(*batch(4))
            assert engine.runtime.saved_inputs._without_room.now == before  # all have room now
            engine.backward(loss)
        ends = [get_full(parameter, "param") for parameter in model.parameters()] if "moved" not in after else None
    plain = outcome(settings(**clip), steps=4)
    assert [loss.item() for loss in losses] == plain[0]
    assert ends is None or all(map(torch.equal, ends, plain[1]))


def test_moves_leave_the_room_that_inputs_take(tmp_path: Path) -> None:
    config = settings(
        tiers={"nvme": [str(tmp_path)], "activations": "host", "host_bytes": 1_500_000, "device_bytes": 300_000}
    )
    with initialize(DropoutModel(), config=config)[0] as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        present, migration = engine.runtime.placement, engine.runtime.migration
        assert migration.obstacle(present) is None
        for nbytes, obstacle in ((40_960, None), (1_400_000, "no hole of the host tier would be large enough")):
            items = dict(present.host_items) | {"saved inputs": nbytes}
            assert migration.obstacle(replace(present, host_items=items)) == obstacle


@pytest.mark.parametrize(
    ("where", "nbytes", "remedy"),
    [("host", 12_000, "write tiers.activations: nvme"), ("nvme", 4096, "Raise tiers.activation_bytes")],
)
def test_too_little_room_is_refused_with_the_remedy(tmp_path: Path, where: str, nbytes: int, remedy: str) -> None:
    config = settings(**on_nvme(tmp_path, activations=where, host_bytes=8_000_000, activation_bytes=nbytes))
    wanted = pytest.raises(BudgetError, match=f"saved inputs: an input of 8,192 bytes.*{remedy}")
    with initialize(DropoutModel(), config=config)[0] as engine, wanted:
        engine(*batch(0))


def test_the_quota_of_a_path_counts_saved_inputs(tmp_path: Path) -> None:
    config = settings(tiers={"nvme": [{"path": str(tmp_path), "bytes": 20_000}], "activations": "nvme"})
    config["tiers"]["placement"] = {"param": "device", "exp_avg": "host", "exp_avg_sq": "host"}
    wanted = pytest.raises(BudgetError, match=r"saved inputs wants 8,192 bytes.*may have 20,000")
    with initialize(DropoutModel(), config=config)[0] as engine, wanted:
        engine(*batch(0))


def test_a_graph_can_be_gone_through_twice_and_dropped(tmp_path: Path) -> None:
    for activations in ("keep", "nvme"):
        torch.manual_seed(0)
        model = DropoutModel()
        with initialize(model, config=settings(**on_nvme(tmp_path, activations=activations)))[0] as engine:
            torch.manual_seed(1)
            engine(*batch(7))  # never gone back through
            loss = engine(*batch(0))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            if activations == "keep":
                plain = [get_full(parameter) for parameter in model.parameters()]
            else:
                again = [get_full(parameter) for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class Moody(nn.Module):
    """Does something else every time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x if self.calls % 2 else x[:, :8].repeat(1, 2) * x[:, :1])


class Careless(nn.Module):
    """Changes its input in place after it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x.detach())
        x.add_(1)
        return out


def one_of(block: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(block, nn.Tanh()))


def test_blocks_that_do_not_repeat_themselves_are_named() -> None:
    with initialize(one_of(Moody()), config=settings(tiers={"activations": "device"}))[0] as engine:
        loss = engine(torch.randn(2, 16)).sum()
        with pytest.raises(
            RuntimeError, match=r"^1 does not do the same when it is computed again: .*activations: keep"
        ):
            engine.backward(loss)


def test_an_input_changed_in_place_is_told_where_it_was_not_copied() -> None:
    with initialize(one_of(Careless()), config=settings(tiers={"activations": "device"}))[0] as engine:
        loss = engine(torch.randn(2, 16)).sum()
        with pytest.raises(RuntimeError, match="changed in place"):
            engine.backward(loss)


def test_what_has_no_blocks_or_running_statistics_is_refused() -> None:
    flat = nn.Linear(16, 16)
    counted = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    for model in (flat, counted):
        with pytest.raises(ConfigError, match=r"tiers\.activations: wants blocks.*engine\.checkpoint\(\)"):
            initialize(model, config=settings(tiers={"activations": "host"}))
        assert "forward" not in vars(model)


def test_blocks_have_their_own_forward_again_after_close() -> None:
    model = DropoutModel()
    own = model.blocks[0].forward
    with initialize(model, config=settings(tiers={"activations": "host"}))[0]:
        assert model.blocks[0].forward != own
    assert model.blocks[0].forward == own
    assert "forward" not in vars(model.blocks[0])


class ByHand(nn.Module):
    """A part without blocks, which checkpoints by calling the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.checkpoint: Any = lambda function, *args: function(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.checkpoint(self.stretch, self.first(x)).square().mean()

    def stretch(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.second(torch.tanh(x)), 0.5)


def test_checkpoint_by_hand_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = ByHand()
        with initialize(model, config=settings(**on_nvme(tmp_path)))[0] as engine:
            if by_hand:
                object.__setattr__(model, "checkpoint", engine.checkpoint)
            torch.manual_seed(1)
            for _ in range(2):
                engine.backward(engine(torch.randn(4, 64)))
                engine.step()
            found.append([get_full(parameter) for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

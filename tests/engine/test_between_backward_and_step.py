"""Updates that start under the backward pass are not seen, and not lost, before step()."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_model import SmallModel, batch, build, differences, on_nvme, settings, train_with_engine, train_with_torch
from torch.utils.checkpoint import checkpoint

from lamina.engine import initialize
from lamina.zero import get_full, set_full


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_state_read_before_the_step_is_that_of_the_last_step(param: str, tmp_path: Path) -> None:
    model = build()
    with initialize(model, config=settings(**on_nvme(tmp_path, param=param)))[0] as engine:
        before = [get_full(parameter, "master") for parameter in model.parameters()]
        engine.backward(engine(*batch(0)))
        engine.runtime.updater.drain()
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert torch.equal(get_full(parameter, "master"), old)
            assert get_full(parameter, "exp_avg").abs().max() == 0
        engine.step()
        assert not torch.equal(get_full(next(model.parameters()), "master"), before[0])


def test_a_forward_pass_before_the_step_is_refused_where_it_would_see_new_parameters(tmp_path: Path) -> None:
    with initialize(build(), config=settings(**on_nvme(tmp_path, param="none")))[0] as engine:
        engine.backward(engine(*batch(0)))
        with pytest.raises(RuntimeError, match="overlap_update: false"):
            engine(*batch(1))
        engine.step()
        engine(*batch(1))


def test_a_forward_pass_before_the_step_sees_the_old_parameters_where_they_are_fetched(tmp_path: Path) -> None:
    with initialize(build(), config=settings(**on_nvme(tmp_path)))[0] as engine:
        loss = engine(*batch(0))
        engine.backward(loss)
        assert engine(*batch(0)).item() == loss.item()
        engine.step()


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_a_rate_changed_before_the_step_counts(param: str, tmp_path: Path) -> None:
    model = build()
    losses = []
    with initialize(model, config=settings(**on_nvme(tmp_path, param=param)))[0] as engine:
        for index in range(3):
            engine.set_lr(0.5)
            loss = engine(*batch(index))
            engine.backward(loss)
            engine.set_lr(1e-3)
            engine.step()
            assert engine.optimizer.outcome.redone > 0
            losses.append(loss.item())
        masters = [get_full(parameter, "master") for parameter in model.parameters()]
    assert list(differences((losses, masters), train_with_torch(steps=3))) == []


def test_a_rate_changed_before_the_step_is_refused_when_the_gradient_was_given_up(tmp_path: Path) -> None:
    config = settings(**on_nvme(tmp_path, host_bytes=3_000_000))
    with initialize(build(), config=config)[0] as engine:
        engine.backward(engine(*batch(0)))
        engine.set_lr(0.5)
        with pytest.raises(RuntimeError, match=r"tiers\.host_bytes"):
            engine.step()


def edited_in_torch(clipping: float) -> tuple[list[float], list[torch.Tensor]]:
    """Norms before clipping and final parameters of plain PyTorch, one gradient set to 0 and another to ten times."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    norms = []
    for index in range(2):
        model(*batch(index)).backward()
        parameters = list(model.parameters())
        for factor, parameter in zip(FACTORS, parameters, strict=False):
            parameter.grad.mul_(factor)
        norms.append(sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5)
        if clipping:
            torch.nn.utils.clip_grad_norm_(parameters, clipping)
        optimizer.step()
        optimizer.zero_grad()
    return norms, [parameter.detach() for parameter in model.parameters()]


FACTORS = (0.0, 10.0)
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "host": {"param": "cpu", "optimizer": "cpu"},
    "optimizer on nvme": {"param": "none"},
    "nvme": {},
    "gradients in a file": {"host_bytes": 1_500_000, "overlap_update": False},
}


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("place", PLACES)
def test_c05_an_edited_gradient_counts_in_norm_and_update(place: str, clipping: float, tmp_path: Path) -> None:
    where = {} if place == "memory" else on_nvme(tmp_path, **PLACES[place])
    model, norms = build(), []
    with initialize(model, config=settings(gradient_clipping=clipping, **where))[0] as engine:
        assert bool(engine.runtime.placement.scratch_bytes) == (place == "gradients in a file")
        for index in range(2):
            engine.backward(engine(*batch(index)))
            for factor, parameter in zip(FACTORS, model.parameters(), strict=False):
                set_full(parameter, "grad", get_full(parameter, "grad") * factor)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        masters = [get_full(parameter, "master") for parameter in model.parameters()]
    wanted, theirs = edited_in_torch(clipping)
    assert norms == pytest.approx(wanted, rel=1e-6)
    if clipping:  # torch takes the norm, and so the factor, in another order
        assert all(
            torch.allclose(ours, other, rtol=1e-5, atol=1e-7) for ours, other in zip(masters, theirs, strict=True)
        )
    else:
        assert list(differences(([], masters), ([], theirs))) == []


class CheckpointedTwice(SmallModel):
    """Every block is used twice and run again in the backward pass, with a backward pass of its own for each use."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_parameters_stay_old_for_a_block_that_is_run_again(param: str, tmp_path: Path) -> None:
    outcomes = []
    for overlap in ("auto", False):
        torch.manual_seed(0)
        config = settings(**on_nvme(tmp_path, param=param, overlap_update=overlap))
        outcomes.append(train_with_engine(config, model=CheckpointedTwice(), steps=3))
    assert list(differences(*outcomes)) == []


class Checkpointed(SmallModel):
    """Every block is run again in the backward pass by torch's means; the head's weight is used outside of its module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(tied=False)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(self.loss, x, targets, use_reentrant=self.reentrant)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, self.head.weight).flatten(0, 1).float(), targets.flatten())


class OnlyHead(Checkpointed):
    """Checkpoints what calls no module."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).requires_grad_()
        return checkpoint(self.loss, x, targets, use_reentrant=self.reentrant)


SECOND_LOSS = pytest.mark.parametrize(
    ("kind", "reentrant", "bf16"),
    [(Checkpointed, False, False), (Checkpointed, True, True), (OnlyHead, False, True)],
)


def two_losses(
    config: dict[str, Any], kind: type[Checkpointed], *, reentrant: bool, own: bool = False
) -> list[torch.Tensor]:
    """Masters after two steps on two losses that share no graph."""
    torch.manual_seed(0)
    model = kind(reentrant=reentrant)
    with initialize(model, config=config)[0] as engine:
        for step in range(2):
            first, second = (engine(*batch(2 * step + part)) for part in range(2))
            engine.backward(first)
            engine.runtime.updater.drain()
            if own:
                second.backward()
            engine.backward(second)
            engine.step()
        return [master for p in model.parameters() if (master := get_full(p, "master")) is not None]


@SECOND_LOSS
@pytest.mark.parametrize("param", ["none", "cpu"])
def test_a_second_loss_that_would_run_blocks_again_with_new_parameters_is_refused(
    param: str, kind: type[Checkpointed], reentrant: bool, bf16: bool, tmp_path: Path
) -> None:
    config = settings(bf16={"enabled": bf16}, **on_nvme(tmp_path, param=param))
    with pytest.raises(RuntimeError, match=r"used again before step\(\).*overlap_update: false"):
        two_losses(config, kind, reentrant=reentrant)
    # What is refused is the use: the same loops go through where updates wait.
    config["tiers"]["overlap_update"] = False
    two_losses(config, kind, reentrant=reentrant)


def test_a_backward_pass_of_ones_own_that_would_run_blocks_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"used again before step\(\).*overlap_update: false"):
        two_losses(settings(**on_nvme(tmp_path, param="none")), Checkpointed, reentrant=True, own=True)


def test_training_goes_on_once_the_refused_window_is_dropped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False)
    with initialize(model, config=settings(**on_nvme(tmp_path, param="none")))[0] as engine:
        first, second = (engine(*batch(part)) for part in range(2))
        engine.backward(first)
        with pytest.raises(RuntimeError, match="used again"):
            engine.backward(second)
        engine.zero_grad()
        again = engine(*batch(0))
        assert again.item() == first.item()
        engine.backward(again)
        engine.step()


@SECOND_LOSS
def test_a_second_loss_runs_blocks_again_with_old_parameters_where_they_are_fetched(
    kind: type[Checkpointed], reentrant: bool, bf16: bool, tmp_path: Path
) -> None:
    outcomes = [
        two_losses(
            settings(bf16={"enabled": bf16}, **on_nvme(tmp_path, overlap_update=overlap)), kind, reentrant=reentrant
        )
        for overlap in ("auto", False)
    ]
    assert list(differences(([], outcomes[0]), ([], outcomes[1]))) == []

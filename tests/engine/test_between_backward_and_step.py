"""Updates that start under the backward pass are not seen, and not lost, before step()."""

from pathlib import Path

import pytest
import torch
from small_model import batch, build, differences, on_nvme, settings, train_with_torch

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


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_an_edited_gradient_counts(param: str, tmp_path: Path) -> None:
    outcomes = []
    for config in (settings(), settings(**on_nvme(tmp_path, param=param))):
        model = build()
        with initialize(model, config=config)[0] as engine:
            for index in range(2):
                engine.backward(engine(*batch(index)))
                for factor, parameter in zip((0.0, 10.0), model.parameters(), strict=False):
                    set_full(parameter, "grad", get_full(parameter, "grad") * factor)
                engine.step()
            masters = [get_full(parameter, "master") for parameter in model.parameters()]
            outcomes.append(([engine.get_global_grad_norm()], masters))
    assert list(differences(*outcomes)) == []

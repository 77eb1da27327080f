"""Accumulation: who scales, who sets the boundary, what happens to windows that are not finished (C-06)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.zero import get_full

SMALL = {"width": 32, "hidden": 64, "blocks": 2}


def engine_for(tmp_path: Path | None = None, **changes: Any) -> Any:
    extra = on_nvme(tmp_path) if tmp_path is not None else {}
    return initialize(build(**SMALL), config=settings(**changes, **extra))[0]


def masters(engine: Any) -> list[torch.Tensor]:
    return [get_full(parameter, "master") for parameter in engine.module.parameters()]


def gradients(engine: Any) -> list[torch.Tensor]:
    return [get_full(parameter, "grad") for parameter in engine.module.parameters()]


def plain_gradients(losses: Any) -> list[torch.Tensor]:
    model = build(**SMALL)
    losses(model)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("accumulation", [1, 4, 8])
def test_c06_the_loss_is_not_altered_and_the_gradient_is_the_mean(accumulation: int) -> None:
    with engine_for(gradient_accumulation_steps=accumulation) as engine:
        model = build(**SMALL)
        for index in range(accumulation):
            loss = engine(*batch(index))
            assert engine.backward(loss) is loss
            assert loss.item() == model(*batch(index)).item()
            assert engine.is_gradient_accumulation_boundary() == (index == accumulation - 1)
            if index < accumulation - 1:
                engine.step()
        wanted = plain_gradients(
            lambda model: [(model(*batch(i)) / accumulation).backward() for i in range(accumulation)]
        )
        assert all(map(torch.equal, gradients(engine), wanted))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_own_backward_with_scale_equals_engine_backward(own: bool, where: str, tmp_path: Path) -> None:
    results = []
    for use_own in (own, False):
        with engine_for(tmp_path if where == "nvme" else None, gradient_accumulation_steps=2) as engine:
            for index in range(4):
                loss = engine(*batch(index))
                if use_own:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            results.append(masters(engine))
    assert all(map(torch.equal, *results))


def test_an_unscaled_backward_is_refused_where_it_would_be_wrong() -> None:
    with engine_for(gradient_accumulation_steps=2) as engine:
        engine(*batch(0)).backward()
        with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)\.backward\(\)"):
            engine.step()
        engine.backward(engine(*batch(0)))
        engine.step()
    with engine_for() as engine:
        engine(*batch(0)).backward()  # nothing to scale
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_several_losses_and_a_part_of_the_graph(where: str, tmp_path: Path) -> None:
    def parts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(*batch(0)), model.embed(batch(1)[0]).float().pow(2).mean()

    with engine_for(tmp_path if where == "nvme" else None) as engine:
        before = masters(engine)
        loss, penalty = engine(*batch(0)), None
        with engine.runtime.forward_context():
            penalty = engine.module.embed(batch(1)[0]).float().pow(2).mean()
        engine.backward(loss, retain_graph=True)
        engine.backward(penalty)
        engine.step()
        after = masters(engine)
    model = build(**SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for part in parts(model):
        part.backward()
    optimizer.step()
    assert all(torch.equal(a, p.detach()) for a, p in zip(after, model.parameters(), strict=True))
    assert not any(map(torch.equal, before, after))


def test_non_scalar_outputs() -> None:
    with engine_for() as engine:
        hidden = engine.module.embed(batch(0)[0])
        weight = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
        with pytest.raises(ValueError, match="scalar"):
            engine.backward(hidden)
        engine.scale(hidden).backward(weight)
        wanted = plain_gradients(lambda model: model.embed(batch(0)[0]).backward(weight))
        assert torch.equal(gradients(engine)[0], wanted[0])


def test_the_caller_sets_the_boundary_and_no_sync_never_is_one() -> None:
    with engine_for(gradient_accumulation_steps=8) as engine:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*batch(0)))
        engine.step()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(*batch(1)))
        engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        engine.set_gradient_accumulation_boundary(None)
        assert not engine.is_gradient_accumulation_boundary()
    with engine_for() as engine:
        with engine.no_sync():
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(engine(*batch(0)))
            with pytest.raises(RuntimeError, match="inside no_sync"):
                engine.step()
        engine.backward(engine(*batch(1)))
        wanted = plain_gradients(lambda model: [model(*batch(i)).backward() for i in range(2)])
        assert all(map(torch.equal, gradients(engine), wanted))
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_zero_grad_drops_the_window(where: str, tmp_path: Path) -> None:
    """Also updates that were started under the backward pass, and what they did to parameters that memory caches."""
    extra = on_nvme(tmp_path, param="none") if where == "nvme" else {}
    with initialize(build(**SMALL), config=settings(**extra))[0] as engine:
        before = masters(engine)
        output = engine(*batch(5)).item()
        engine.backward(engine(*batch(0)))
        engine.zero_grad()
        assert all(map(torch.equal, masters(engine), before))
        assert engine(*batch(5)).item() == output
        engine.backward(engine(*batch(1)))
        engine.step()
        dropped = masters(engine)
    with engine_for() as engine:
        engine.backward(engine(*batch(1)))
        engine.step()
        assert all(map(torch.equal, masters(engine), dropped))


@pytest.mark.parametrize("by", ["zero_grad", "load_checkpoint"])
def test_what_a_cut_backward_pass_left_in_grad_is_dropped(by: str, tmp_path: Path) -> None:
    """A hook of the user's own, called before the engine takes the gradient over, raises (or Ctrl-C comes there)."""
    cut = False

    def stop(parameter: torch.Tensor) -> None:
        if cut:
            raise ValueError("the user's own hook")

    model = build(**SMALL)
    next(model.parameters()).register_post_accumulate_grad_hook(stop)
    with initialize(model, config=settings(**on_nvme(tmp_path / "nvme")))[0] as engine, engine_for() as plain:
        engine.save_checkpoint(str(tmp_path), tag="start")
        cut = True
        with pytest.raises(ValueError, match="own hook"):
            engine.backward(engine(*batch(0)))
        cut = False
        engine.zero_grad() if by == "zero_grad" else engine.load_checkpoint(str(tmp_path), tag="start")
        for each in (engine, plain):
            each.backward(each(*batch(1)))
            each.step()
        assert all(map(torch.equal, masters(engine), masters(plain)))


def test_train_batch_goes_on_in_an_open_window_and_wants_an_iterator() -> None:
    with engine_for(gradient_accumulation_steps=3) as engine:
        with pytest.raises(StopIteration):
            engine.train_batch(iter([batch(0), batch(1)]))
        assert (engine.global_steps, engine.micro_steps) == (0, 2)
        engine.train_batch(iter([batch(2)]))
        after = masters(engine)
        assert engine.global_steps == 1
        with pytest.raises(TypeError, match="start over with every call"):
            engine.train_batch([batch(0)] * 3)
    with engine_for(gradient_accumulation_steps=3) as engine:
        loss = engine.train_batch(iter([batch(index) for index in range(3)]))
        assert all(map(torch.equal, masters(engine), after))
        model = build(**SMALL)
        assert loss.item() == torch.stack([model(*batch(index)).detach() for index in range(3)]).mean().item()
        assert engine.eval_batch(iter([batch(7)] * 3)).item() > 0
        assert engine.module.training


def test_unused_parameters_are_an_error_only_when_asked_for() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x).mean()

    for ignore in (True, False):
        zero = {"stage": 2, "ignore_unused_parameters": ignore}
        with initialize(Half(), config=settings(zero_optimization=zero))[0] as engine:
            engine.backward(engine(torch.ones(2, 4)))
            if ignore:
                engine.step()
                assert engine.was_step_applied()
            else:
                with pytest.raises(RuntimeError, match=r"no gradient for unused\.weight, unused\.bias"):
                    engine.step()

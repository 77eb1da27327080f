"""Modules that cannot be trained or run as they are: on the meta device, owned by an open engine, left by a closed one."""

from pathlib import Path

import pytest
import torch
from small_model import batch, build, on_nvme, settings
from torch import nn

from lamina.engine import ConfigError, initialize

SMALL = {"width": 32, "hidden": 64, "blocks": 2}
GONE = r"are not in memory, and the engine that had them was closed.*save_pretrained\(dir\) or module.state_dict\(\)"


def test_parameters_on_the_meta_device_are_named_with_the_remedy(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build(**SMALL)
    with pytest.raises(ValueError, match=r"embed\.weight, .* more: on the meta device.*init\.materialize.*to_empty"):
        initialize(model, config=settings(**on_nvme(tmp_path / "n")))
    half = build(**SMALL)
    half.blocks[1].up.to("meta")
    with pytest.raises(ValueError, match=r"^blocks\.1\.up\.weight, blocks\.1\.up\.bias: on the meta device"):
        initialize(half, config=settings())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_a_module_of_an_open_engine_is_refused_and_the_engine_goes_on(where: str, tmp_path: Path) -> None:
    extra = on_nvme(tmp_path / "n") if where == "nvme" else {}
    model = build(**SMALL)
    with initialize(model, config=settings(**extra))[0] as engine:
        with pytest.raises(ValueError, match=r"engine that is still open\. Call close\(\) on that engine first"):
            initialize(model, config=settings(**extra))
        engine.backward(engine(*batch(0)))
        engine.step()


def test_the_module_of_a_closed_engine_computes_no_nan(tmp_path: Path) -> None:
    model, fresh = build(**SMALL), build(**SMALL)
    config = settings(**on_nvme(tmp_path / "n"))
    with initialize(model, config=config)[0] as engine:
        wanted = engine(*batch(0))
    with pytest.raises(RuntimeError, match=rf"embed\.weight and of \d+ others {GONE}"):
        model(*batch(0))
    with pytest.raises(RuntimeError, match=rf"blocks\.1\.up\.weight and of 1 others {GONE}"):
        model.blocks[1].up(torch.ones(1, 32))
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.empty(parameter.shape)))
    model.load_state_dict(fresh.state_dict())
    assert torch.equal(model(*batch(0)), wanted)
    assert not model._forward_pre_hooks
    model.head.weight = model.embed.weight
    with initialize(model, config=config)[0] as engine:
        assert torch.equal(engine(*batch(0)), wanted)
        assert not any("Refusal" in type(h).__name__ for p in model.modules() for h in p._forward_pre_hooks.values())


def test_a_module_whose_initialize_failed_late_is_refused_as_well(tmp_path: Path) -> None:
    model = build(**SMALL)
    config = settings(scheduler={"type": "WarmupLR", "params": {}}, **on_nvme(tmp_path / "n"))
    with pytest.raises(ConfigError, match="keep one of the two"):
        initialize(model, config=config, lr_scheduler=lambda optimizer: optimizer)
    with pytest.raises(RuntimeError, match=GONE):
        model(*batch(0))


def test_what_stays_in_memory_is_still_usable_after_close() -> None:
    model = build(**SMALL)
    with initialize(model, config=settings(zero_optimization={"stage": 0}))[0] as engine:
        wanted = engine(*batch(0))
    assert torch.equal(model(*batch(0)), wanted)

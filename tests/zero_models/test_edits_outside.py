"""Case C-20: a partitioned weight that is edited outside a forward keeps the edit, or the edit is refused; it is never lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from both_ways import built, nvme
from odd_models import MODELS, tokens
from torch import nn

from lamina.engine import initialize
from lamina.zero import GatheredParameters, get_full, set_full

EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "nn.init": nn.init.normal_,
    "copy_": lambda weight: weight.copy_(torch.ones(weight.shape)),
    "index": lambda weight: weight.__setitem__(0, 1.0),
    "data": lambda weight: weight.data.fill_(1.0),
}


def use_after(_edited: object, engine: Callable[..., object]) -> None:
    """What was not refused by the edit itself is told at the next use."""
    engine(*tokens(0))


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_placeholders_are_refused_and_kept_in_a_gathered_block(edit: str, tmp_path: Path) -> None:
    module = built(MODELS["Scalars"])
    with initialize(module, config=nvme(tmp_path))[0] as engine, torch.no_grad():
        weight = module.layers[1].up.weight
        before = get_full(weight)
        with pytest.raises(RuntimeError, match=r"written-to tensor|layers\.1\.up\.weight"):
            use_after(EDITS[edit](weight), engine)
        assert torch.equal(get_full(weight), before)
        with pytest.raises(RuntimeError, match=r"without a writer: layers\.1\.up\.weight"), GatheredParameters(weight):
            EDITS[edit](weight)
        assert torch.equal(get_full(weight), before)
        with GatheredParameters(weight, modifier_rank=0):
            EDITS[edit](weight)
            wanted = weight.clone()
        assert torch.equal(get_full(weight), wanted)
        assert not torch.equal(wanted, before)
        engine(*tokens(0))


@pytest.mark.parametrize("name", ["scale", "layers.2.one"])
def test_a_write_into_a_placeholder_of_one_element_is_told_at_its_next_use(name: str, tmp_path: Path) -> None:
    module = built(MODELS["Scalars"])
    with initialize(module, config=nvme(tmp_path))[0] as engine, torch.no_grad():
        parameter = module.get_parameter(name)
        parameter.fill_(3.0)
        with pytest.raises(RuntimeError, match=name):
            engine(*tokens(0))
        set_full(parameter, "param", torch.full(parameter.shape, 3.0))
        assert get_full(parameter).item() == 3.0
        engine(*tokens(0))

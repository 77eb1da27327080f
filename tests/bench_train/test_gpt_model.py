"""The byte-level GPT: sizes, causality, and the arithmetic that reports rely on."""

import dataclasses

import pytest
import torch

from lamina.bench.training.gpt import GPT, PRESETS, GPTShape

TOY = GPTShape(layers=2, dim=32, heads=2, seq=24)


def saved_activation_bytes(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of all distinct storages that autograd keeps for the backward pass, parameters excepted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, targets)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(("size", "millions"), [("tiny", 3), ("small", 25), ("base", 100), ("large", 350)])
def test_presets_have_the_stated_size_in_multiples_of_16(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[size])
    lengths = [parameter.numel() for parameter in model.parameters()]
    assert sum(lengths) == PRESETS[size].num_params
    assert sum(lengths) / 1e6 == pytest.approx(millions, rel=0.12)
    assert [length for length in lengths if length % 16] == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_the_embedding_and_counts_once(tied: bool) -> None:
    shape = dataclasses.replace(TOY, tied=tied)
    model = GPT(shape)
    assert (model.head.weight is model.embed.weight) == tied
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_activation_bytes_are_what_autograd_keeps(dtype: torch.dtype, tied: bool) -> None:
    shape = dataclasses.replace(TOY, tied=tied, layers=3)
    model = GPT(shape).to(dtype)
    tokens = torch.randint(256, (2, shape.seq))
    kept = saved_activation_bytes(model, tokens, tokens.clone())
    assert shape.activation_bytes(batch=2, itemsize=dtype.itemsize) == pytest.approx(kept, abs=64)


def test_a_byte_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = GPT(TOY)
    tokens = torch.randint(256, (1, TOY.seq))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_loss_is_the_cross_entropy_of_the_logits_and_starts_near_that_of_guessing() -> None:
    torch.manual_seed(0)
    model = GPT(TOY)
    tokens, targets = torch.randint(256, (4, TOY.seq)), torch.randint(256, (4, TOY.seq))
    expected = -torch.log_softmax(model(tokens), -1).gather(-1, targets[..., None]).mean()
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, expected)
    assert float(loss.detach()) == pytest.approx(5.545, abs=0.2)


def test_wrong_shapes_name_the_option_and_a_value_that_works() -> None:
    with pytest.raises(ValueError, match=r"--dim 96 is not divisible by --heads 5: use --heads 4, or --dim 100"):
        GPTShape(layers=1, dim=96, heads=5, seq=8)
    with pytest.raises(ValueError, match="--layers 0: must be at least 1"):
        GPTShape(layers=0, dim=16, heads=1, seq=8)
    with pytest.raises(ValueError, match="25 bytes of context exceed the model's 24"):
        GPT(TOY)(torch.zeros(1, 25, dtype=torch.int64))

"""The plain PyTorch trainer that comparisons rest on, against the formulas written out."""

import copy
from typing import Any

import pytest
import torch

from lamina.bench.training.corpus import Batch
from lamina.bench.training.gpt import GPT, GPTShape
from lamina.bench.training.reference import PlainTrainer, train_plain

SHAPE = GPTShape(layers=1, dim=16, heads=2, seq=8)
ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
}


def new_model() -> GPT:
    torch.manual_seed(3)
    return GPT(SHAPE)


def new_batch(step: int, rows: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(step)
    rows_and_next = torch.randint(256, (rows, SHAPE.seq + 1), generator=draw)
    return Batch(rows_and_next[:, :-1], rows_and_next[:, 1:])


def adamw_by_hand(model: GPT, batches: list[Batch], rates: list[float], clip: float) -> None:
    """The textbook update in fp64 on an fp64 model, one batch a step."""
    options = ADAMW["params"]
    beta1, beta2 = options["betas"]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=1):
        gradients = torch.autograd.grad(model(*batch), list(model.parameters()))
        norm = torch.sqrt(sum((g * g).sum() for g in gradients))  # type: ignore[arg-type]
        factor = min(1.0, clip / float(norm)) if clip else 1.0
        with torch.no_grad():
            for p, g, (m, v) in zip(model.parameters(), gradients, moments, strict=True):
                g = g * factor
                m.mul_(beta1).add_((1 - beta1) * g)
                v.mul_(beta2).add_((1 - beta2) * g * g)
                p.mul_(1 - rate * options["weight_decay"])
                root = (v / (1 - beta2**step)).sqrt() + options["eps"]
                p.sub_(rate * (m / (1 - beta1**step)) / root)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_fp32_follows_the_written_out_adamw_at_the_given_rates(clip: float) -> None:
    rates = [1e-3, 3e-3, 2e-3]
    trainer = PlainTrainer(new_model(), dtype="fp32", optimizer=ADAMW, clip=clip, device="cpu")
    losses = train_plain(trainer, batches_of=lambda step: [new_batch(step)], rates=rates)
    expected = new_model().double()
    adamw_by_hand(expected, [new_batch(step) for step in range(3)], rates, clip)
    for mine, right in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-4, atol=2e-6)
    assert losses[0] == pytest.approx(float(new_model()(*new_batch(0)).detach()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_batches_average_to_the_whole_batch(dtype: str) -> None:
    whole = PlainTrainer(new_model(), dtype=dtype, optimizer=ADAMW, clip=0.0, device="cpu")
    parts = PlainTrainer(new_model(), dtype=dtype, optimizer=ADAMW, clip=0.0, device="cpu")
    batch = new_batch(0)
    halves = [Batch(batch.tokens[at : at + 2], batch.targets[at : at + 2]) for at in (0, 2)]
    assert parts.step(halves, 1e-2) == pytest.approx(whole.step([batch], 1e-2), rel=1e-3)
    before = new_model().state_dict()
    moved = [
        torch.cat([(after - before[name]).flatten() for name, after in trainer.model.state_dict().items()])
        for trainer in (whole, parts)
    ]
    # Adam's first step is the gradient's sign: only elements whose gradient is nearly 0 may differ.
    agree = torch.isclose(*moved, rtol=0.1, atol=1e-3).float().mean()
    assert float(agree) > (0.99 if dtype == "fp32" else 0.95)


def test_bf16_keeps_fp32_masters_that_steps_below_the_rounding_do_reach() -> None:
    trainer = PlainTrainer(new_model(), dtype="bf16", optimizer=ADAMW, clip=0.0, device="cpu")
    start = copy.deepcopy(trainer.model.state_dict())
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    rates = [1e-6] * 4
    train_plain(trainer, batches_of=lambda step: [new_batch(step)], rates=rates)
    ones = trainer.model.norm.weight
    assert torch.equal(ones, start["norm.weight"])  # 1 - 4e-6 rounds to 1
    train_plain(trainer, batches_of=lambda step: [new_batch(0)], rates=[1e-3] * 8)
    assert not torch.equal(ones, start["norm.weight"])
    master = dict(zip(dict(trainer.model.named_parameters()), trainer._masters, strict=True))["norm.weight"]
    assert torch.equal(master.bfloat16(), ones)
    assert not torch.equal(master, ones.float())


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(ValueError, match="--compare knows the optimizer AdamW, not 'Adam'"):
        PlainTrainer(new_model(), dtype="fp32", optimizer={"type": "Adam"}, clip=0.0, device="cpu")

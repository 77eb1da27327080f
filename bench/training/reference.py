"""The same training in plain PyTorch, memory-resident: what `lamina train --compare` compares with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.bench.training.corpus import Batch
from lamina.bench.training.gpt import GPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PlainTrainer:
    """A model, its fp32 masters where it computes in bf16, and torch.optim.AdamW(fused=True)."""

    def __init__(self, model: GPT, *, dtype: str, optimizer: Mapping[str, Any], clip: float, device: str) -> None:
        """`model` has fp32 parameters; `optimizer` is the config's block. ValueError when it is not AdamW."""
        if optimizer.get("type") != "AdamW":
            raise ValueError(f"--compare knows the optimizer AdamW, not {optimizer.get('type')!r}")
        options = {**optimizer.get("params", {})}
        options["betas"] = tuple(options.get("betas", (0.9, 0.999)))
        # The config's default, unlike torch's 0.01.
        options.setdefault("weight_decay", 0.0)
        self.model = model.to(device)
        self._clip = clip
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []
        if dtype == "fp32":
            self._masters: list[Tensor] = list(model.parameters())
        else:
            self._masters = [parameter.detach().clone() for parameter in model.parameters()]
            model.to(DTYPES[dtype])
            self._pairs = list(zip(model.parameters(), self._masters, strict=True))
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **options)

    def step(self, batches: Sequence[Batch], rate: float) -> float:
        """One optimizer step at learning rate `rate`; returns the mean loss of the micro-batches."""
        losses = []
        for batch in batches:
            loss = self.model(*batch)
            (loss / len(batches)).backward()
            losses.append(float(loss.detach()))
            self._collect_gradients()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
        return sum(losses) / len(losses)

    def _collect_gradients(self) -> None:
        """Add the compute-dtype gradients of one micro-batch to the fp32 gradients of the masters."""
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None


def train_plain(
    trainer: PlainTrainer,
    *,
    batches_of: Callable[[int], Sequence[Batch]],
    rates: Sequence[float],
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """One step for each of `rates`, on the batches that `batches_of(step)` gives; returns the losses."""
    losses = []
    for step, rate in enumerate(rates):
        losses.append(trainer.step(batches_of(step), rate))
        on_step(losses[-1])
    return losses

"""The block `optimizer`: Adam and AdamW run on any tier, torch's own where their state stays in memory."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from lamina.engine.config.block import Block, Pair, hint

Decay = Annotated[float, Field(ge=0)]


class AdamParams(Block):
    """Hyper-parameters of Adam and AdamW; a param group of the model may override the first four."""

    lr: Annotated[float, Field(ge=0)] = Field(default=1e-3, description="learning rate")
    betas: Pair = Field(default=(0.9, 0.999), description="decay of the two moments, each in [0, 1)")
    eps: Annotated[float, Field(ge=0)] = Field(default=1e-8, description="added to the denominator")
    weight_decay: Decay = Field(default=0.0, description="decoupled from the gradient unless adam_w_mode is false")
    bias_correction: bool = Field(default=True, description="correct the moments' start at zero")
    adam_w_mode: bool = Field(default=True, description="decoupled weight decay; type AdamW always has it")
    maximize: bool = Field(default=False, description="ascend instead of descend")
    torch_adam: bool = hint(False, "the same update is computed on every tier, with torch's formula")
    fused: bool | None = hint(None, "the update is always fused")
    foreach: bool | None = hint(None, "the update is always fused")


class AdamConfig(Block):
    """`type` is Adam or AdamW in its canonical spelling."""

    type: Literal["Adam", "AdamW"] = Field(description="Adam, AdamW or a class of torch.optim")
    params: AdamParams = AdamParams()

    @property
    def adamw_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self.type == "AdamW" or self.params.adam_w_mode


class TorchOptimizerConfig(Block):
    """An optimizer of torch.optim, by its class name there; `params` are its keyword arguments."""

    type: str = Field(description="name of the class in torch.optim")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")


OptimizerConfig = AdamConfig | TorchOptimizerConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """What a `type` names: Adam on any tier, or a class of torch.optim with its keyword parameters."""

    name: str
    adam: bool
    parameters: Mapping[str, inspect.Parameter]


_ADAM = {"adam": "Adam", "adamw": "AdamW", "cpuadam": "Adam", "deepspeedcpuadam": "Adam", "fusedadam": "Adam"}
_TORCH = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_NOT_OFFERED = {
    "lbfgs": "it calls the model several times a step",
    "sparseadam": "gradients are dense",
    "onebitadam": "it rounds what it sends",
    "zerooneadam": "it rounds what it sends",
    "onebitlamb": "it rounds what it sends",
    **dict.fromkeys(("lamb", "lion", "muon", "muadam", "muadamw", "musgd"), "there is no kernel for it"),
}


def optimizer_kind(given: object) -> tuple[OptimizerKind | None, str | None]:
    """What the `type` key names, or None and what is wrong with it. Upper and lower case are the same."""
    listed = ", ".join(("Adam", "AdamW", *_TORCH))
    if given is None:
        return None, f"is required: one of {listed}"
    if given == "auto":
        return None, f'is "auto", which decides nothing here: write one of {listed}'
    if not isinstance(given, str):
        return None, f"want a string, one of {listed}; got {given!r} ({type(given).__name__})"
    name = given.lower()
    if name in _ADAM:
        return OptimizerKind(name=_ADAM[name], adam=True, parameters={}), None
    for known in _TORCH:
        if known.lower() == name:
            signature = inspect.signature(getattr(torch.optim, known))
            parameters = {key: value for key, value in signature.parameters.items() if key != "params"}
            return OptimizerKind(name=known, adam=False, parameters=parameters), None
    if name in _NOT_OFFERED:
        return (
            None,
            f"{given!r} is not offered: {_NOT_OFFERED[name]}; write Adam or AdamW, or pass optimizer= to initialize()",
        )
    near = difflib.get_close_matches(given, ["Adam", "AdamW", *_TORCH], n=1, cutoff=0.5)
    likely = f"; did you mean {near[0]}?" if near else ""
    return (
        None,
        f"{given!r} is not one of {listed}{likely}; a class of your own is passed as optimizer= to initialize()",
    )

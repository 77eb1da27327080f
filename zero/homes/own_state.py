"""Bytes that an optimizer of torch will keep for itself, found out before it takes a step.

[Note: own state] Only the optimizer knows which tensors it makes. A copy of it (class, group options, attributes) takes a step on
one parameter of the right shape on torch's meta device, where tensors have shapes and no memory. A class that looks at
values cannot do that; it takes the step on a small tensor whose dimensions are all different, so that the shapes of what it
makes tell which dimension of the parameter each has. Nothing is guessed: where neither says, the reason is kept.
"""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_SMALL_DIMS = (2, 3, 5, 7, 11, 13)


class OwnState:
    """What an optimizer will keep for each parameter, in bytes. ``unknown``: why, for what could not be found out."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.unknown = ""
        self._optimizer = optimizer
        self._group_of: dict[int, int] = {}
        if optimizer is not None:
            self._group_of = {id(p): index for index, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._known: dict[tuple[int, torch.Size, tuple[str, ...]], int | None] = {}

    def trains(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._group_of

    def nbytes(self, parameter: nn.Parameter, shape: Sequence[int]) -> int:
        """Bytes for the fp32 master of ``shape`` that stands for a parameter; 0 for one that it does not train, and for what is
        ``unknown``."""
        index = self._group_of.get(id(parameter))
        if self._optimizer is None or index is None:
            return 0
        made = self._optimizer.state.get(parameter, {})
        key = (index, torch.Size(shape), tuple(made))
        if key not in self._known:
            self._known[key] = self._find_out(index, torch.Size(shape), parameter, made)
        return self._known[key] or 0

    def _find_out(self, index: int, shape: torch.Size, parameter: nn.Parameter, made: Mapping[str, Any]) -> int | None:
        try:
            tensors = self._after_a_step(index, shape, parameter, made, device="meta")
            return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        except Exception:  # noqa: BLE001 - whatever somebody's class raises where there are no values to look at
            return self._from_a_small_step(index, shape, parameter, made)

    def _from_a_small_step(
        self, index: int, shape: torch.Size, parameter: nn.Parameter, made: Mapping[str, Any]
    ) -> int | None:
        small = torch.Size(dim if whole > 1 else whole for dim, whole in zip(_SMALL_DIMS, shape, strict=False))
        name = type(self._optimizer).__name__
        if len(small) < len(shape):
            self.unknown = (
                self.unknown
                or f"{name} keeps something for parameters of {len(shape)} dimensions that only a step shows"
            )
            return None
        try:
            tensors = self._after_a_step(index, small, parameter, made, device="cpu")
            return sum(_scaled(tensor.shape, small, shape) * tensor.itemsize for tensor in tensors)
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            self.unknown = self.unknown or f"a trial step of {name} ended with {type(error).__name__}: {error}"
            return None

    def _after_a_step(
        self, index: int, shape: torch.Size, parameter: nn.Parameter, made: Mapping[str, Any], *, device: str
    ) -> list[torch.Tensor]:
        """The tensors of the state after a copy of the optimizer has stepped on one parameter of the shape."""
        optimizer = self._optimizer
        if optimizer is None:
            return []
        trial = object.__new__(type(optimizer))
        # A schedule puts a `step` of its own on the object, which counts the real optimizer's steps.
        for name, value in vars(optimizer).items():
            if name != "step":
                trial.__dict__[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
        for hooks in [name for name in vars(trial) if name.startswith("_optimizer_") and name.endswith("_hooks")]:
            trial.__dict__[hooks] = OrderedDict()
        options = {name: value for name, value in optimizer.param_groups[index].items() if name != "params"}
        master = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        master.grad = torch.ones_like(master)
        trial.param_groups = [copy.deepcopy(options) | {"params": [master]}]
        trial.state = defaultdict(dict)
        state = {name: _like(value, parameter, master) for name, value in made.items()}
        if state:
            trial.state[master] = state
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            trial.step()
        return list(_tensors_in(trial.state[master]))


def _like(value: Any, parameter: nn.Parameter, master: torch.Tensor) -> Any:
    """What the optimizer has made already for a parameter, for its master."""
    if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
        return torch.zeros_like(master)
    return copy.deepcopy(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _scaled(found: torch.Size, small: torch.Size, shape: torch.Size) -> int:
    """Elements of a tensor that has the shape ``found`` beside a parameter of ``small``, for one of ``shape``.

    Raises ValueError where it has a dimension that is not the parameter's."""
    if tuple(found) == (small.numel(),):
        return shape.numel()
    whole = dict(zip(small, shape, strict=True)) | {1: 1}
    if any(dim not in whole for dim in found):
        raise ValueError(f"it made a tensor of shape {list(found)} for a parameter of shape {list(small)}")
    return math.prod(whole[dim] for dim in found)

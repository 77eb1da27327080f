"""Activation checkpointing: a block's saved tensors are given up and computed again when the backward pass asks for them.

[Note: computed again] While a block runs, autograd's saved tensors are counted instead of kept, except for parameters,
which are kept as references as everywhere (see [Note: saved parameters]). The first one that the backward pass asks for
makes the block run again on its saved inputs, under the random state and autocast it had, and the n-th tensor saved then is
the n-th asked for. The operations are the same ones on the same bits, and so are the gradients. The second run ends with
the last tensor that is needed. It also comes before the first parameter is handed out that the backward pass asks for: an
operation may take its parameter before its activation, and would hold that beside all that the run fetches.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .hooks import SavedActivation, SavedParameter, ZeroState
from .saved_inputs import Kept, SavedInputs


class _Complete(Exception):
    """Every tensor that the backward pass needs is there."""


@dataclass(frozen=True)
class _Input:
    """Stands in a block's arguments for a tensor that is kept elsewhere."""

    index: int


@dataclass(frozen=True)
class _Surroundings:
    """What an operation's result depends on besides its inputs."""

    random: torch.Tensor
    device_random: tuple[torch.device, torch.Tensor] | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device: torch.device | None) -> "_Surroundings":
        kinds = ["cpu", *([device.type] if device is not None and device.type != "cpu" else [])]
        return cls(
            random=torch.get_rng_state(),
            device_random=(device, torch.cuda.get_rng_state(device)) if device and device.type == "cuda" else None,
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )

    def enter(self, stack: ExitStack) -> None:
        """Bring them back until the stack is closed."""
        stack.enter_context(torch.random.fork_rng(devices=[self.device_random[0]] if self.device_random else []))
        torch.set_rng_state(self.random)
        if self.device_random is not None:
            torch.cuda.set_rng_state(self.device_random[1], self.device_random[0])
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))


class _Run:
    """One forward pass through a block, until its graph is gone. See [Note: computed again]."""

    def __init__(self, owner: "Recomputer", title: str, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._owner = owner
        self._title = title
        self._call = call
        self.inputs: list[Kept] = []
        self._needs_gradient: list[bool] = []
        self._args = self._put_away(args)
        self._kwargs = self._put_away(kwargs)
        self._surroundings = _Surroundings.now(owner.device)
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, SavedActivation] = {}
        self._asked: set[int] = set()  # what was asked for in this pass over the graph, each once
        self._before: weakref.ref[_Run] | None = None

    def forward(self, before: "_Run | None", args: Any, kwargs: Any) -> Any:
        self._before = weakref.ref(before) if before is not None else None
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._call(*args, **kwargs)

    def prefetch(self) -> None:
        for kept in self.inputs:
            kept.prefetch()

    def _pack(self, tensor: torch.Tensor) -> SavedParameter | int:
        reference = self._owner.state.reference(tensor)
        if reference is not None:
            return reference
        self._forms.append((tensor.shape, tensor.dtype))
        return len(self._forms) - 1

    def _unpack(self, packed: SavedParameter | int) -> torch.Tensor:
        key = (
            -id(packed) if isinstance(packed, SavedParameter) else packed
        )  # a reference would count as a use of the parameter
        if key in self._asked:
            self._asked.clear()
        if self._forms and not self._values and not self._asked:
            self._run_again()
        self._asked.add(key)
        if isinstance(packed, SavedParameter):
            return self._owner.state.unpack(packed)
        if packed not in self._values:
            self._run_again()
        return self._owner.state.unpack(self._values.pop(packed))

    def _run_again(self) -> None:
        found = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal found
            if self._owner.state.holds(tensor):
                return
            if found < len(self._forms) and (tensor.shape, tensor.dtype) != self._forms[found]:
                raise self._differs(f"tensor {found} saved has shape {tuple(tensor.shape)}, {tensor.dtype}")
            self._values[found] = SavedActivation(tensor.detach(), tensor._version)
            found += 1
            if found >= len(self._forms):
                raise _Complete

        self.prefetch()
        before = self._before() if self._before is not None else None
        if before is not None:
            before.prefetch()
        with ExitStack() as stack:
            self._surroundings.enter(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, _refuse))
            try:
                tensors = [
                    kept.tensor().detach().requires_grad_(needs)
                    for kept, needs in zip(self.inputs, self._needs_gradient, strict=True)
                ]
                self._call(*_put_back(self._args, tensors), **_put_back(self._kwargs, tensors))
            except _Complete:
                pass
        if found < len(self._forms):
            raise self._differs(f"{found} tensors were saved")

    def _differs(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._title} does not do the same when it is computed again: {what}, where the first run saved "
            f"{len(self._forms)}. Its forward must depend on its inputs, parameters and torch's random state alone; write "
            f"tiers.activations: keep where it cannot"
        )

    def _put_away(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, torch.Tensor):
            self.inputs.append(self._owner.inputs.keep(value))
            self._needs_gradient.append(value.requires_grad)
            return _Input(len(self.inputs) - 1)
        return _mapped(value, self._put_away)


class Recomputer:
    """Runs blocks so that they are computed again in the backward pass."""

    def __init__(self, state: ZeroState, inputs: SavedInputs, device: torch.device | None) -> None:
        self.state = state
        self.inputs = inputs
        self.device = device
        self._last: weakref.ref[_Run] | None = None

    def __call__(self, title: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``call(*args, **kwargs)`` returns. Raises what keeping the inputs raises (BudgetError, OSError)."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        args, kwargs = _without_caches(tuple(args)), _without_caches(dict(kwargs))
        run = _Run(self, title, call, args, kwargs)
        before = self._last() if self._last is not None else None
        self._last = weakref.ref(run)
        return run.forward(before, args, kwargs)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Plain containers with their items changed; everything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(change(inner) for inner in value)
    if type(value) is dict:
        return {key: change(inner) for key, inner in value.items()}
    return value


def _put_back(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Input):
        return tensors[value.index]
    return _mapped(value, lambda inner: _put_back(inner, tensors))


def _without_caches(value: Any) -> Any:
    """Key-value caches left out, as transformers does itself: a second run would add to them again. In training they start
    empty, and what a block adds no other block reads."""
    if hasattr(value, "get_seq_length"):
        return None
    return _mapped(value, _without_caches)


def _refuse(_packed: None) -> torch.Tensor:
    raise RuntimeError("the graph of a block that was computed again is not for a backward pass")

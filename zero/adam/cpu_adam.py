"""CPUAdam: Adam and AdamW on CPU parameters as a torch.optim.Optimizer, in one pass of lamina's C kernels.

fp32 parameters take the same steps, bit for bit, as torch.optim.AdamW(fused=True) on whole vectors. bf16
and fp16 parameters keep an fp32-exact master: bf16 as a 16-bit remainder beside the parameter, fp16 as an
fp32 copy.
"""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lamina.zero.adam.kernels import Kernels
from lamina.zero.adam.plain_optimizer import PlainOptimizer, hooked_when_watched
from lamina.zero.adam.slots import AdamSlots
from lamina.zero.adam.state import MASTER_KEY, STATE_DTYPES, check_param, laid_out_like, start_state, where_is


class _Held:
    """A state tensor on its way through Optimizer.load_state_dict, which would cast it to param's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class CPUAdam(PlainOptimizer):
    """Adam(W) for fp32, bf16 and fp16 parameters in host memory; gradients may have any of these dtypes.

    adamw_mode (a group's "decoupled_weight_decay", as torch calls it) chooses AdamW; False adds the decay
    to the gradient. weight_decay is 0 by default in both. num_threads and cores are those of
    lamina.zero.adam.kernels.Kernels; kernels shares existing ones instead.

    The state of each parameter is torch's (step, exp_avg, exp_avg_sq, the moments in fp32) and for bf16
    "remainder" (int16), for fp16 "master" (fp32). State dicts go both ways between this class and
    torch.optim.Adam/AdamW; one without remainder or master starts from the parameter as it is. An edit of a
    bf16 parameter keeps the remainder (less than half a unit of the parameter's last place); an edit of an
    fp16 parameter becomes the master where it was made.

    The options by which torch chooses among its implementations (fused, foreach, capturable, differentiable) are accepted
    where they ask for what this is, one fused pass; a loaded state dict may hold any and they mean nothing here.

    Raises TypeError or ValueError, naming group, index and shape, for complex, integer, fp64, sparse and
    non-CPU parameters (when added) and gradients (at step, before anything is updated), and for amsgrad.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw_mode: bool = True,
        maximize: bool = False,
        bias_correction: bool = True,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        num_threads: int | None = None,
        cores: Iterable[int] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        if foreach or capturable or differentiable or fused is False:
            given = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
            raise ValueError(
                f"{', '.join(f'{name}={value}' for name, value in given.items() if value is not None)}: CPUAdam is one "
                f"fused pass that autograd and graphs do not see; leave these options out"
            )
        self._num_threads = num_threads
        self._cores = None if cores is None else tuple(cores)
        self._given = kernels
        self._own: tuple[int, Kernels] | None = None
        self._slots = AdamSlots()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adamw_mode,
            # They mean nothing here but belong to the state dict of torch's Adam.
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after checking its options and parameters; "adamw_mode" means what it does above."""
        group = dict(param_group)
        if "adamw_mode" in group:
            group["decoupled_weight_decay"] = group.pop("adamw_mode")
        if isinstance(group.get("params"), torch.Tensor):
            group["params"] = [group["params"]]
        if not isinstance(group.get("params"), set | frozenset):  # sets are refused by torch
            group["params"] = list(group["params"])
            _check_params(len(self.param_groups), group["params"])
        _checked_options(len(self.param_groups), {**self.defaults, **group})
        super().add_param_group(group)

    @hooked_when_watched
    def step(self, closure: Callable[[], Any] | None = None, *, grad_multiplier: float = 1.0) -> Any:
        """One step; returns the closure's loss or None. grad_multiplier (unscale, clip) scales every gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels, slots = self._live_kernels(), self._slots
        options = [_checked_options(index, group) for index, group in enumerate(self.param_groups)]
        slots.look(self.param_groups, self.state)
        slots.set_scalars(options, grad_multiplier)
        kernels.adam_batch(slots.batch)
        slots.finish()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this class's or torch Adam's state dict; tensors are copied and keep their precision.

        Nothing is changed when a shape does not fit (ValueError) or the groups differ.
        """
        before = self.register_load_state_dict_pre_hook(_hold_tensors)  # after the user's own hooks
        after = self.register_load_state_dict_post_hook(_release_tensors, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_num_threads": self._num_threads, "_cores": self._cores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("_num_threads", "_cores", "_given", "_own"):
            self.__dict__.setdefault(name, None)
        self._slots = AdamSlots()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _live_kernels(self) -> Kernels:
        if self._given is not None:
            return self._given
        if self._own is None or self._own[0] != os.getpid():  # a forked child has no threads: it gets its own
            self._own = os.getpid(), Kernels(self._num_threads, cores=self._cores)
        self._own[1].use_team()
        return self._own[1]


def _check_params(group: int, params: list[Any]) -> None:
    for index, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(param, torch.Tensor):  # of anything else torch's own check says it best
            check_param(group, index, param)


def _checked_options(index: int, group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as AdamHyper calls them, but for the step. Raises TypeError and ValueError."""
    if group["amsgrad"]:
        raise ValueError(f"group {index}: amsgrad is not supported by CPUAdam: use torch.optim.AdamW for it")
    if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"group {index}: lr has shape {tuple(group['lr'].shape)}; one element is wanted")
    beta1, beta2 = group["betas"]
    options = {
        "lr": _number(index, "lr", group["lr"]),
        "beta1": _number(index, "betas[0]", beta1),
        "beta2": _number(index, "betas[1]", beta2),
        "eps": _number(index, "eps", group["eps"]),
        "weight_decay": _number(index, "weight_decay", group["weight_decay"]),
        "adamw_mode": bool(group["decoupled_weight_decay"]),
        "maximize": bool(group["maximize"]),
        "bias_correction": bool(group["bias_correction"]),
    }
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= options[name] < math.inf:
            raise ValueError(f"group {index}: {name} = {group[name]}: must be finite and not negative")
    if not (0.0 <= options["beta1"] < 1.0 and 0.0 <= options["beta2"] < 1.0):
        raise ValueError(f"group {index}: betas = {group['betas']}: must be at least 0 and less than 1")
    return options


def _number(index: int, name: str, value: Any) -> float:
    """value as a float; text is refused, which float() would read. Raises TypeError."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        raise TypeError(f"group {index}: {name} = {value!r} is of type {type(value).__name__}; give a number")
    return float(value)


def _hold_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    params: dict[Any, tuple[str, torch.Tensor]] = {}
    for g, (group, other) in enumerate(zip(groups, saved, strict=False)):
        _checked_options(g, {**optimizer.defaults, **{k: v for k, v in other.items() if k != "params"}})
        for i, (param, key) in enumerate(zip(group["params"], other["params"], strict=False)):
            params[key] = (where_is(g, i, param), param)
    held = {}
    for key, values in state_dict["state"].items():
        where, param = params.get(key, ("", None))
        for name, value in values.items():
            if param is not None and name in STATE_DTYPES and value.shape != param.shape:
                raise ValueError(f"{where}: the state dict's {name} has shape {tuple(value.shape)}")
        held[key] = {k: _Held(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    return {**state_dict, "state": held}


def _release_tensors(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in optimizer.state:
                continue
            loaded = {k: v.tensor if isinstance(v, _Held) else v for k, v in optimizer.state[param].items()}
            state: dict[str, Any] = {"step": torch.tensor(float(loaded.get("step", 0.0)), dtype=torch.float32)}
            for name, dtype in STATE_DTYPES.items():
                if name in loaded and (name in ("exp_avg", "exp_avg_sq") or name == MASTER_KEY.get(param.dtype)):
                    state[name] = laid_out_like(param.detach(), loaded[name].to(device="cpu", dtype=dtype))
            start_state(param, state)
            optimizer.state[param] = state

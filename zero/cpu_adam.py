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
from torch.autograd.graph import increment_version

from lamina.zero.kernels import AdamBatch, AdamHyper, DType, Kernels
from lamina.zero.plain_optimizer import PlainOptimizer

_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
_MASTER_KEY = {torch.bfloat16: "remainder", torch.float16: "master"}
_STATE_DTYPES = {
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "remainder": torch.int16,
    "master": torch.float32,
}


class _Held:
    """A state tensor on its way through Optimizer.load_state_dict, which would cast it to param's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class CPUAdam(PlainOptimizer):
    """Adam(W) for fp32, bf16 and fp16 parameters in host memory; gradients may have any of these dtypes.

    adamw_mode (a group's "decoupled_weight_decay", as torch calls it) chooses AdamW; False adds the decay
    to the gradient. weight_decay is 0 by default in both. num_threads and cores are those of
    lamina.zero.kernels.Kernels; kernels shares existing ones instead.

    The state of each parameter is torch's (step, exp_avg, exp_avg_sq, the moments in fp32) and for bf16
    "remainder" (int16), for fp16 "master" (fp32). State dicts go both ways between this class and
    torch.optim.Adam/AdamW; one without remainder or master starts from the parameter as it is. An edit of a
    bf16 parameter keeps the remainder (less than half a unit of the parameter's last place); an edit of an
    fp16 parameter becomes the master where it was made.

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
        num_threads: int | None = None,
        cores: Iterable[int] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._cores = None if cores is None else tuple(cores)
        self._given = kernels
        self._own: tuple[int, Kernels] | None = None
        self._batch = AdamBatch()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adamw_mode,
            # Options of torch's Adam that mean nothing here but belong to its state dict: this is its fused
            # arithmetic.
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
        _check_options(len(self.param_groups), {**self.defaults, **group})
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_multiplier: float = 1.0) -> Any:
        """One step; returns the closure's loss or None. grad_multiplier (unscale, clip) scales every gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            _check_options(index, group)
            _check_grads(index, group["params"])
        self._batch.clear()
        written: list[torch.Tensor] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        held: list[torch.Tensor] = []  # copies that must live until the kernels have run
        for group in self.param_groups:
            self._add_group(group, grad_multiplier, written, staged, held)
        self._live_kernels().adam_batch(self._batch)
        for param, copy in staged:
            param.copy_(copy)
        if written:
            increment_version(written)
        return loss

    def _add_group(
        self,
        group: dict[str, Any],
        grad_multiplier: float,
        written: list[torch.Tensor],
        staged: list[tuple[torch.Tensor, torch.Tensor]],
        held: list[torch.Tensor],
    ) -> None:
        updates = [(param, param.grad, self.state[param]) for param in group["params"] if param.grad is not None]
        if not updates:
            return
        for param, _, state in updates:
            if not state:
                _start_state(param, state)
        torch._foreach_add_([state["step"] for _, _, state in updates], 1)
        options = _hyper_options(group)
        hypers: dict[float, AdamHyper] = {}
        for param, grad, state in updates:
            step = state["step"].item()
            if param.numel() == 0:
                continue
            if step not in hypers:
                hypers[step] = AdamHyper(step=int(step), **options)
            target, grad = _dense_pair(param, grad)
            if target is param:
                written.append(param)
            else:
                staged.append((param, target))
            master_key = _MASTER_KEY.get(param.dtype)
            _lay_out_state(target, state, master_key)
            held.append(grad)
            self._batch.add(
                param.numel(),
                hyper=hypers[step],
                param=target.data_ptr(),
                param_dtype=_DTYPES[param.dtype],
                grad=grad.data_ptr(),
                grad_dtype=_DTYPES[grad.dtype],
                exp_avg=state["exp_avg"].data_ptr(),
                exp_avg_sq=state["exp_avg_sq"].data_ptr(),
                master=state["master"].data_ptr() if master_key == "master" else 0,
                remainder=state["remainder"].data_ptr() if master_key == "remainder" else 0,
                grad_multiplier=grad_multiplier,
                adopt_param=True,
            )

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
        self.__dict__.setdefault("_batch", AdamBatch())
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _live_kernels(self) -> Kernels:
        if self._given is not None:
            return self._given
        if self._own is None or self._own[0] != os.getpid():  # a forked child has no threads: it gets its own
            self._own = os.getpid(), Kernels(self._num_threads, cores=self._cores)
        return self._own[1]


def _where(group: int, index: int, param: torch.Tensor) -> str:
    return f"parameter {index} of group {group}, shape {tuple(param.shape)}"


def _check_params(group: int, params: list[Any]) -> None:
    for index, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(param, torch.Tensor):
            continue  # torch's own check says it best
        where = _where(group, index, param)
        if param.layout is not torch.strided:
            raise ValueError(f"{where}: layout {param.layout}; CPUAdam takes dense parameters")
        if param.dtype not in _DTYPES:
            raise TypeError(
                f"{where}: dtype {param.dtype}; CPUAdam takes float32, bfloat16 and float16 "
                f"(split a complex parameter with torch.view_as_real)"
            )
        if param.device.type != "cpu":
            raise ValueError(f"{where}: on {param.device}; CPUAdam takes CPU parameters")


def _check_grads(group: int, params: list[torch.Tensor]) -> None:
    for index, param in enumerate(params):
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{_where(group, index, param)}: its gradient is {grad.layout}; CPUAdam takes dense "
                f"gradients (make the embedding with sparse=False, or use torch.optim.SparseAdam for it)"
            )
        if grad.dtype not in _DTYPES or grad.device.type != "cpu" or param.dtype not in _DTYPES:
            raise TypeError(
                f"{_where(group, index, param)}: {param.dtype} with a gradient {grad.dtype} on "
                f"{grad.device}; CPUAdam takes float32, bfloat16 and float16 on the CPU"
            )


def _check_options(index: int, group: dict[str, Any]) -> None:
    if group["amsgrad"]:
        raise ValueError(f"group {index}: amsgrad is not supported by CPUAdam: use torch.optim.AdamW for it")
    if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"group {index}: lr has shape {tuple(group['lr'].shape)}; one element is wanted")
    limits = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf}
    for name in limits:
        if not 0.0 <= float(group[name]) < math.inf:
            raise ValueError(f"group {index}: {name} = {group[name]}: must be finite and not negative")
    for beta in group["betas"]:
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"group {index}: betas = {group['betas']}: must be at least 0 and less than 1")


def _hyper_options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "adamw_mode": bool(group["decoupled_weight_decay"]),
        "maximize": bool(group["maximize"]),
        "bias_correction": bool(group["bias_correction"]),
    }


def _start_state(param: torch.Tensor, state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(0.0)
    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    _start_master(param, state)


def _start_master(param: torch.Tensor, state: dict[str, Any]) -> None:
    if param.dtype is torch.bfloat16:
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
    elif param.dtype is torch.float16:
        state["master"] = param.detach().float()


def _lay_out_state(param: torch.Tensor, state: dict[str, Any], master_key: str | None) -> None:
    """Sees to it that the state's elements lie in memory in the order of param's (param.data may have been changed)."""
    contiguous = param.is_contiguous()
    for key in ("exp_avg", "exp_avg_sq", master_key):
        if key is None or (contiguous and state[key].is_contiguous()):
            continue
        if state[key].stride() != param.stride():
            state[key] = _laid_out_like(param, state[key])


def _laid_out_like(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(param, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)


def _dense_pair(param: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """param and grad, or copies of them, so that both are dense in memory in the same order of elements."""
    if param.is_contiguous():
        return param, grad if grad.is_contiguous() and not grad.is_neg() else grad.resolve_neg().contiguous()
    dense = torch.empty_like(param, memory_format=torch.preserve_format)
    target = param if dense.stride() == param.stride() else dense.copy_(param)
    if grad.is_neg() or grad.stride() != target.stride():
        grad = _laid_out_like(target, grad)
    return target, grad


def _hold_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    params: dict[Any, tuple[str, torch.Tensor]] = {}
    for g, (group, other) in enumerate(zip(groups, saved, strict=False)):
        _check_options(g, {**optimizer.defaults, **{k: v for k, v in other.items() if k != "params"}})
        for i, (param, key) in enumerate(zip(group["params"], other["params"], strict=False)):
            params[key] = (_where(g, i, param), param)
    held = {}
    for key, values in state_dict["state"].items():
        where, param = params.get(key, ("", None))
        for name, value in values.items():
            if param is not None and name in _STATE_DTYPES and value.shape != param.shape:
                raise ValueError(f"{where}: the state dict's {name} has shape {tuple(value.shape)}")
        held[key] = {k: _Held(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    return {**state_dict, "state": held}


def _release_tensors(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in optimizer.state:
                continue
            loaded = {k: v.tensor if isinstance(v, _Held) else v for k, v in optimizer.state[param].items()}
            state: dict[str, Any] = {"step": torch.tensor(float(loaded.get("step", 0.0)))}
            for name, dtype in _STATE_DTYPES.items():
                if name in loaded and (name in ("exp_avg", "exp_avg_sq") or name == _MASTER_KEY.get(param.dtype)):
                    state[name] = _laid_out_like(param.detach(), loaded[name].to(device="cpu", dtype=dtype))
            if param.dtype in _MASTER_KEY and _MASTER_KEY[param.dtype] not in state:
                _start_master(param, state)
            optimizer.state[param] = state

"""What one Adam update is told: the hyper-parameters of a step, the planes, and batches of both in C's own form."""

import math
from dataclasses import dataclass
from typing import Any

from lamina.zero._kernels import ffi, lib
from lamina.zero.adam.plane import DType, check_planes

SUM_PIECE: int = lib.LK_SUM_PIECE
"""Elements to a checksum, see AdamPlanes.sums."""

_IN_PARAM, _SPLIT, _COPY = range(3)  # enum lk_master


@dataclass(frozen=True, kw_only=True)
class AdamHyper:
    """What one Adam step needs besides its planes. `step` counts from 1."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int
    adamw_mode: bool = True
    """True: param shrinks by lr * weight_decay (AdamW). False: weight_decay * param joins the gradient."""
    maximize: bool = False
    bias_correction: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step = {self.step}: Adam's steps count from 1 (add one before the update)")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} = {value}: must be at least 0 and less than 1")
        for name in ("eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ValueError(f"{name} = {value}: must not be negative")
        if math.isnan(self.lr):
            raise ValueError("lr is NaN: give a number")


def num_sums(n: int) -> int:
    """How many checksums an update of n elements writes for each plane."""
    return -(-n // SUM_PIECE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamPlanes:
    """The planes of one update: n elements at each address, updated in place; the gradient is only read.

    fp32 parameters are their own master. A bf16 parameter takes either `remainder` (int16, see Kernels.split_bf16) or
    `master` (fp32), an fp16 one takes `master`; the new parameter is the rounded new master. exp_avg and exp_avg_sq are
    fp32. adopt_param, with `master`: where param is not the rounded master, it was edited and becomes the master.
    counter: the address of one fp32 that counts the steps done, raised by one after the update; 0 for none.
    sums: the address of num_sums(n) uint32 for each written plane (param, exp_avg, exp_avg_sq, then remainder or master),
    which take the CRC32C of each SUM_PIECE elements of it, the last piece being shorter; 0 for none.
    Raises ValueError for planes that do not fit together, are null or misaligned.
    """

    n: int
    param: int
    param_dtype: DType
    grad: int
    grad_dtype: DType
    exp_avg: int
    exp_avg_sq: int
    master: int = 0
    remainder: int = 0
    adopt_param: bool = False
    counter: int = 0
    sums: int = 0

    def __post_init__(self) -> None:
        check_planes(
            self.n,
            (self.param, self.param_dtype.itemsize, "param"),
            (self.grad, self.grad_dtype.itemsize, "grad"),
            (self.exp_avg, 4, "exp_avg"),
            (self.exp_avg_sq, 4, "exp_avg_sq"),
        )
        kind = self.master_kind
        others = ((self.master, 4, "master"), (self.remainder, 2, "remainder"))
        check_planes(0, *others, (self.counter, 4, "counter"), (self.sums, 4, "sums"))
        if self.n > 0 and kind != _IN_PARAM and not self.master and not self.remainder:
            wanted = "remainder (int16) or master (fp32)" if self.param_dtype is DType.BF16 else "master (fp32)"
            raise ValueError(f"a {self.param_dtype.name.lower()} param needs {wanted}")

    @property
    def master_kind(self) -> int:
        """How the master is kept (enum lk_master)."""
        if self.param_dtype is DType.FP32:
            if self.master or self.remainder:
                raise ValueError("an fp32 param is its own master: leave master and remainder 0")
            return _IN_PARAM
        if self.master and self.remainder:
            raise ValueError("give either master or remainder, not both")
        if self.param_dtype is DType.FP16 and self.remainder:
            raise ValueError("an fp16 param cannot be split: give its fp32 plane as master")
        return _SPLIT if self.param_dtype is DType.BF16 and not self.master else _COPY


class AdamScalars:
    """The scalars of a step in C's form, shared by all updates that were added with them; set() serves the next step."""

    def __init__(self, hyper: AdamHyper, grad_multiplier: float = 1.0) -> None:
        self.struct = ffi.new("lk_adam_scalars *")
        self.set(hyper, grad_multiplier)

    def set(self, hyper: AdamHyper, grad_multiplier: float = 1.0) -> None:
        """Takes hyper's values; grad_multiplier (unscale times clip) is applied to the gradient first."""
        self.form(grad_multiplier, **vars(hyper))

    def form(
        self,
        grad_multiplier: float,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        adamw_mode: bool,
        maximize: bool,
        bias_correction: bool,
    ) -> None:
        """set() for the values of an AdamHyper that have been checked already."""
        # Formed in double like torch's own, rounded once by the assignment to a C float.
        correction1 = 1.0 - beta1**step if bias_correction else 1.0
        correction2 = 1.0 - beta2**step if bias_correction else 1.0
        self.struct[0] = (
            -grad_multiplier if maximize else grad_multiplier,
            1.0 - lr * weight_decay if adamw_mode else 1.0,
            weight_decay,
            beta2,
            1.0 - beta1,
            1.0 - beta2,
            math.sqrt(correction2),
            eps,
            -(lr / correction1),
            step,
            not adamw_mode and weight_decay != 0.0,
        )


class AdamBatch:
    """Adam updates of separate planes to be done together (Kernels.adam_batch), again and again where they stay the same."""

    def __init__(self) -> None:
        self._args = ffi.new("lk_adam_args[]", 1)
        self._scalars: list[AdamScalars | None] = []  # keeps alive what the C structs point to

    @property
    def args(self) -> Any:
        """The C array; only the first len(batch) entries count. Replaced when the batch grows."""
        return self._args

    def __len__(self) -> int:
        return len(self._scalars)

    def clear(self) -> None:
        """Forgets the updates, keeps the memory."""
        self._scalars.clear()

    def add(self, planes: AdamPlanes, scalars: AdamScalars) -> int:
        """Adds one update; its index."""
        index = self.reserve()
        self.put(index, planes, scalars)
        return index

    def reserve(self) -> int:
        """Adds a place where nothing is done until an update is put there; its index."""
        index = len(self._scalars)
        if index == len(self._args):
            larger = ffi.new("lk_adam_args[]", 2 * index)
            larger[0:index] = self._args[0:index]
            self._args = larger
        self._scalars.append(None)
        self.rest(index)
        return index

    def put(self, index: int, planes: AdamPlanes, scalars: AdamScalars) -> None:
        """Replaces one update."""
        self._args[index] = (
            planes.n,
            planes.param,
            planes.grad,
            planes.exp_avg,
            planes.exp_avg_sq,
            planes.master,
            planes.remainder,
            planes.counter,
            planes.sums,
            scalars.struct,
            planes.param_dtype,
            planes.grad_dtype,
            planes.master_kind,
            planes.adopt_param,
        )
        self._scalars[index] = scalars

    def set_scalars(self, index: int, scalars: AdamScalars) -> None:
        """Gives one update the scalars of another step."""
        self._args[index].scalars = scalars.struct
        self._scalars[index] = scalars

    def set_grad(self, index: int, address: int) -> None:
        """Gives one update another gradient of the same dtype, at an address aligned as the planes' was."""
        self._args[index].grad = address

    def counters_agree(self) -> bool:
        """Whether every counter stands at one less than the step of its update's scalars."""
        return bool(lib.lk_counters_agree(self._args, len(self)))

    def rest(self, index: int) -> None:
        """Lets one update do nothing until it is put again."""
        self._args[index].n = 0
        self._args[index].counter = 0

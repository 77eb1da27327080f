"""The CPU kernels of the optimizer step: Adam and its companions over flat planes, in C, given by address.

A plane is a contiguous run of n elements at a raw address that the caller keeps alive during the call; fp32
planes must lie at a multiple of 4, 16-bit planes of 2. Calls release the GIL, and one Kernels may be called
from several Python threads at once (large calls take turns). Results do not depend on threads, path, chunks
or alignment.
"""

import enum
import errno
import math
import os
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina.zero._kernels import ffi, lib

NORM_BLOCK = 4096
"""Elements per partial sum of squared_norm: a plane cut at multiples of this has the same partials."""

_PATHS = ("portable", "avx2", "avx512", "neon")  # index: enum lk_path
_IN_PARAM, _SPLIT, _COPY = range(3)  # enum lk_master
_MAX_THREADS = 1024
_UNALIGNED = 3  # address bits that must be 0 for a 4-byte element; 2-byte ones are shifted by one first
_WIDE = (0, 1, 1)  # index: DType


class DType(enum.IntEnum):
    """Element type of a plane."""

    FP32 = 0
    BF16 = 1
    FP16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FP32 else 2


class SingleCoreWarning(RuntimeWarning):
    """The default left the kernels one thread: the step runs at the speed of one core."""


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


class AdamBatch:
    """Adam updates of separate planes to be done together (Kernels.adam_batch); reusable after clear()."""

    def __init__(self) -> None:
        self._args = ffi.new("lk_adam_args[]", 1)
        self._count = 0
        self._scalars: tuple[AdamHyper, float, Any] | None = None

    @property
    def args(self) -> Any:
        """The C array; only the first len(batch) entries count."""
        return self._args

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forgets the updates, keeps the memory."""
        self._count = 0

    def add(
        self,
        n: int,
        *,
        hyper: AdamHyper,
        param: int,
        param_dtype: DType,
        grad: int,
        grad_dtype: DType,
        exp_avg: int,
        exp_avg_sq: int,
        master: int = 0,
        remainder: int = 0,
        grad_multiplier: float = 1.0,
        adopt_param: bool = False,
    ) -> None:
        """Adds one update: as Kernels.adam, but nothing runs yet."""
        kind = _master_kind(param_dtype, master, remainder, n)
        # One look for the usual case; the checks that name the plane only where it fails.
        if (
            n <= 0
            or not (param and grad and exp_avg and exp_avg_sq)
            or _UNALIGNED
            & (param << _WIDE[param_dtype] | grad << _WIDE[grad_dtype] | exp_avg | exp_avg_sq | master | remainder << 1)
        ):
            _check_planes(
                n,
                (param, param_dtype.itemsize, "param"),
                (grad, grad_dtype.itemsize, "grad"),
                (exp_avg, 4, "exp_avg"),
                (exp_avg_sq, 4, "exp_avg_sq"),
            )
            if kind != _IN_PARAM:
                _check_planes(min(n, 0), (master, 4, "master"), (remainder, 2, "remainder"))
        if self._count == len(self._args):
            larger = ffi.new("lk_adam_args[]", 2 * self._count)
            larger[0 : self._count] = self._args[0 : self._count]
            self._args = larger
        args = self._args[self._count]
        self._args[self._count] = self._scalars_for(hyper, grad_multiplier)[0]
        args.n = n
        args.param, args.param_dtype = param, param_dtype
        args.grad, args.grad_dtype = grad, grad_dtype
        args.exp_avg, args.exp_avg_sq = exp_avg, exp_avg_sq
        args.master, args.remainder = master, remainder
        args.master_kind = kind
        args.adopt_param = adopt_param
        self._count += 1

    def _scalars_for(self, hyper: AdamHyper, grad_multiplier: float) -> Any:
        """A C struct with the scalars filled in, kept for the next update with the same ones."""
        if self._scalars is None or self._scalars[0] is not hyper or self._scalars[1] != grad_multiplier:
            args = ffi.new("lk_adam_args *")
            _fill_scalars(args, hyper, grad_multiplier)
            self._scalars = hyper, grad_multiplier, args
        return self._scalars[2]


class Kernels:
    """The kernels on one dispatch path with a fixed pool of C threads.

    num_threads counts all threads that work on a call, the caller's included; None takes the cores this
    process may use divided by LOCAL_WORLD_SIZE, if a launcher has set it, and warns (SingleCoreWarning)
    when that leaves one. cores binds the threads to these cores, in turn; then the caller itself only
    waits, so that updates stay off the cores that compute (calls of one chunk still run on the caller).
    path forces "avx512", "avx2", "neon" or "portable"; None takes the best. Raises ValueError for an
    unknown path, for one that this processor lacks, and for cores that do not exist here.
    """

    path: str
    num_threads: int

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        cores: Sequence[int] | None = None,
        path: str | None = None,
    ) -> None:
        self._pool = None
        self.path = _check_path(path)
        bound = _check_cores(cores)
        if num_threads is None:
            num_threads = len(bound) or default_num_threads()
            if num_threads == 1 and not bound:
                warnings.warn(
                    "lamina's CPU kernels have one core to run on, so the optimizer step runs at one core's "
                    "speed: give the process more cores (taskset, cgroup, LOCAL_WORLD_SIZE) or pass "
                    "num_threads to say that one is meant",
                    SingleCoreWarning,
                    stacklevel=2,
                )
        if not 1 <= num_threads <= _MAX_THREADS:
            raise ValueError(f"num_threads = {num_threads}: must be 1 to {_MAX_THREADS}")
        self.num_threads = num_threads
        self._owner = os.getpid()
        out = ffi.new("lk_pool **")
        rc = lib.lk_open(out, num_threads, ffi.new("int[]", bound), len(bound), _PATHS.index(self.path))
        if rc:
            raise OSError(-rc, f"cannot start {num_threads} kernel threads on cores {bound or 'any'}")
        self._pool = ffi.gc(out[0], lib.lk_free)

    def adam(
        self,
        n: int,
        *,
        hyper: AdamHyper,
        param: int,
        param_dtype: DType,
        grad: int,
        grad_dtype: DType,
        exp_avg: int,
        exp_avg_sq: int,
        master: int = 0,
        remainder: int = 0,
        grad_multiplier: float = 1.0,
        adopt_param: bool = False,
    ) -> None:
        """One Adam step over n elements in one pass, in place; the gradient is only read.

        fp32 parameters are their own master. A bf16 parameter takes either `remainder` (int16, see
        split_bf16) or `master` (fp32), an fp16 one takes `master`; the new parameter is the rounded new
        master. exp_avg and exp_avg_sq are fp32. grad_multiplier (unscale times clip) is rounded to fp32 and
        applied to the gradient first. adopt_param, with `master`: where param is not the rounded master, it
        was edited and becomes the master.
        """
        batch = AdamBatch()
        batch.add(
            n,
            hyper=hyper,
            param=param,
            param_dtype=param_dtype,
            grad=grad,
            grad_dtype=grad_dtype,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            master=master,
            remainder=remainder,
            grad_multiplier=grad_multiplier,
            adopt_param=adopt_param,
        )
        self.adam_batch(batch)

    def adam_batch(self, batch: "AdamBatch") -> None:
        """All the updates of a batch in one call: many small planes cost little more than one large one."""
        self._raise(lib.lk_adam(self._live(), batch.args, len(batch)))

    def squared_norm_partials(self, n: int, *, src: int, dtype: DType, out: int) -> int:
        """Writes the sum of squares of each block of NORM_BLOCK elements (a double) to out; returns how many.

        The order inside a block is fixed; infinities and NaN show in the block's sum.
        """
        _check_planes(n, (src, dtype.itemsize, "src"), (out, 8, "out"))
        self._raise(lib.lk_squared_norm(self._live(), n, src, dtype, out))
        return num_norm_blocks(n)

    def squared_norm(self, n: int, *, src: int, dtype: DType) -> float:
        """Sum of squares of n elements, the partial sums added without rounding error (math.fsum)."""
        partials = array("d", bytes(8 * num_norm_blocks(n)))
        self.squared_norm_partials(n, src=src, dtype=dtype, out=partials.buffer_info()[0])
        return math.fsum(partials)

    def has_nonfinite(self, n: int, *, src: int, dtype: DType) -> bool:
        """Whether an infinity or a NaN is among n elements."""
        _check_planes(n, (src, dtype.itemsize, "src"))
        rc = lib.lk_has_nonfinite(self._live(), n, src, dtype)
        self._raise(min(rc, 0))
        return rc == 1

    def accumulate(self, n: int, *, dst: int, src: int, src_dtype: DType, scale: float = 1.0, add: bool = True) -> None:
        """dst (fp32) += src * scale, or = with add=False; the product is rounded to fp32, then the sum."""
        _check_planes(n, (dst, 4, "dst"), (src, src_dtype.itemsize, "src"))
        self._raise(lib.lk_accumulate(self._live(), n, dst, src, src_dtype, scale, add))

    def split_bf16(self, n: int, *, master: int, param: int, remainder: int) -> None:
        """Splits an fp32 master into bf16 param and int16 remainder = master bits - (param bits << 16).

        [Note: Ties of the split] param is the master rounded to nearest. A master exactly half-way between
        two bf16 values goes to the one of larger magnitude, not to the even one: an even param would have
        to stand for both of its half-way neighbours, 65,537 masters for 65,536 remainders, and one would be
        lost. NaN stays NaN.
        """
        _check_planes(n, (master, 4, "master"), (param, 2, "param"), (remainder, 2, "remainder"))
        self._raise(lib.lk_split_bf16(self._live(), n, master, param, remainder))

    def merge_bf16(self, n: int, *, master: int, param: int, remainder: int) -> None:
        """Rebuilds the fp32 master (written) from bf16 param and int16 remainder."""
        _check_planes(n, (master, 4, "master"), (param, 2, "param"), (remainder, 2, "remainder"))
        self._raise(lib.lk_merge_bf16(self._live(), n, master, param, remainder))

    def convert(self, n: int, *, src: int, src_dtype: DType, dst: int, dst_dtype: DType) -> None:
        """dst = src rounded to nearest even; NaN stays NaN. The planes must not overlap."""
        _check_planes(n, (src, src_dtype.itemsize, "src"), (dst, dst_dtype.itemsize, "dst"))
        self._raise(lib.lk_convert(self._live(), n, src, src_dtype, dst, dst_dtype))

    def stream(self, n: int, *, source: Sequence[int], target: Sequence[int], non_temporal: bool = False) -> None:
        """Reads three fp32 planes, writes three (the same or others): the ceiling that benchmarks compare with."""
        if len(source) != 3 or len(target) != 3:
            raise ValueError(f"source and target must be 3 addresses each, not {len(source)} and {len(target)}")
        align = 64 if non_temporal else 4
        _check_planes(n, *((a, align, "plane") for a in (*source, *target)))
        lists = ffi.new("uintptr_t[]", list(source)), ffi.new("uintptr_t[]", list(target))
        self._raise(lib.lk_stream(self._live(), n, *lists, non_temporal))

    def close(self) -> None:
        """Ends the threads, after the calls in flight; safe to repeat. Later calls raise ValueError."""
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            lib.lk_stop(pool)

    def __enter__(self) -> "Kernels":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _live(self) -> Any:
        if self._pool is None:
            raise ValueError("these Kernels are closed: create new ones")
        return self._pool

    def _raise(self, rc: int) -> None:
        if rc == 0:
            return
        if rc == -errno.ESTALE:
            raise RuntimeError(
                f"these Kernels belong to process {self._owner}; threads do not survive a fork: "
                f"create new Kernels in process {os.getpid()}"
            )
        if rc == -errno.EBADF:
            raise ValueError("these Kernels are closed: create new ones")
        raise OSError(-rc, f"kernel call failed: {os.strerror(-rc)}")


def available_paths() -> tuple[str, ...]:
    """The dispatch paths that this processor can run, the best one first."""
    best = lib.lk_best_path()
    others = [i for i in range(len(_PATHS)) if i != best and lib.lk_path_usable(i)]
    return tuple(_PATHS[i] for i in (best, *sorted(others, reverse=True)))


def default_num_threads() -> int:
    """The cores this process may use, shared out among the ranks that a launcher says run on this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1
    return max(1, min(len(os.sched_getaffinity(0)) // share, _MAX_THREADS))


def num_norm_blocks(n: int) -> int:
    """How many partial sums squared_norm_partials writes for n elements."""
    return -(-n // NORM_BLOCK)


def _check_path(path: str | None) -> str:
    if path is None:
        return _PATHS[lib.lk_best_path()]
    if path not in _PATHS:
        raise ValueError(f"path = {path!r}: must be one of {', '.join(_PATHS)}, or None for the best here")
    if path not in available_paths():
        raise ValueError(
            f"path = {path!r}: this processor cannot run it; it can run {', '.join(available_paths())} "
            f"(None takes the first)"
        )
    return path


def _check_cores(cores: Sequence[int] | None) -> list[int]:
    if cores is None:
        return []
    allowed = os.sched_getaffinity(0)
    bad = sorted(set(cores) - allowed)
    if bad or not cores:
        raise ValueError(f"cores = {list(cores)}: this process may use {sorted(allowed)}; None binds nothing")
    return list(cores)


def _check_planes(n: int, *planes: tuple[int, int, str]) -> None:
    if n < 0:
        raise ValueError(f"n = {n}: must not be negative")
    for address, align, name in planes:
        if address % align:
            raise ValueError(f"{name} = {address:#x}: must be a multiple of {align} bytes")
        if address == 0 and n > 0:
            raise ValueError(f"{name} is a null address for n = {n} elements")


def _master_kind(param_dtype: DType, master: int, remainder: int, n: int) -> int:
    if param_dtype is DType.FP32:
        if master or remainder:
            raise ValueError("an fp32 param is its own master: leave master and remainder 0")
        return _IN_PARAM
    if master and remainder:
        raise ValueError("give either master or remainder, not both")
    if param_dtype is DType.FP16 and remainder:
        raise ValueError("an fp16 param cannot be split: give its fp32 plane as master")
    if n > 0 and not master and not remainder:
        wanted = "remainder (int16) or master (fp32)" if param_dtype is DType.BF16 else "master (fp32)"
        raise ValueError(f"a {param_dtype.name.lower()} param needs {wanted}")
    return _SPLIT if param_dtype is DType.BF16 and not master else _COPY


def _fill_scalars(args: Any, hyper: AdamHyper, grad_multiplier: float) -> None:
    # Formed in double like torch's own, rounded once by the assignment to a C float.
    corrected = hyper.bias_correction
    correction1 = 1.0 - hyper.beta1**hyper.step if corrected else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if corrected else 1.0
    decay = 1.0 - hyper.lr * hyper.weight_decay if hyper.adamw_mode else 1.0
    scalars = {
        "grad_multiplier": -grad_multiplier if hyper.maximize else grad_multiplier,
        "decay": decay,
        "weight_decay": hyper.weight_decay,
        "l2": int(not hyper.adamw_mode and hyper.weight_decay != 0.0),
        "beta2": hyper.beta2,
        "one_minus_beta1": 1.0 - hyper.beta1,
        "one_minus_beta2": 1.0 - hyper.beta2,
        "bias_correction2_sqrt": math.sqrt(correction2),
        "eps": hyper.eps,
        "neg_step_size": -(hyper.lr / correction1),
    }
    for name, value in scalars.items():
        setattr(args, name, value)

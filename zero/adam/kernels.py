"""The CPU kernels of the optimizer step: Adam and its companions over flat planes, in C, given by address.

A plane is a contiguous run of n elements at a raw address that the caller keeps alive during the call; fp32
planes must lie at a multiple of 4, 16-bit planes of 2. Calls release the GIL, and one Kernels may be called
from several Python threads at once (large calls take turns). Results do not depend on threads, path, chunks
or alignment.
"""

import errno
import os
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

from lamina.zero._kernels import ffi, lib
from lamina.zero.adam.plane import DType, check_planes
from lamina.zero.adam.update import SUM_PIECE, AdamBatch, AdamHyper, AdamPlanes, AdamScalars, num_sums

__all__ = [
    "NORM_BLOCK",
    "SUM_PIECE",
    "AdamBatch",
    "AdamHyper",
    "AdamPlanes",
    "AdamScalars",
    "DType",
    "Kernels",
    "SingleCoreWarning",
    "available_paths",
    "copy_bytes",
    "default_num_threads",
    "num_norm_blocks",
    "num_sums",
]

NORM_BLOCK = 4096
"""Elements to a sum of squared_norm: a plane cut at multiples of this has the same sums."""

_PATHS = ("portable", "avx2", "avx512", "neon")  # index: enum lk_path
_MAX_THREADS = 1024


class SingleCoreWarning(RuntimeWarning):
    """The default left the kernels one thread: the step runs at the speed of one core."""


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

    def adam(self, planes: AdamPlanes, hyper: AdamHyper, grad_multiplier: float = 1.0) -> None:
        """One Adam step in one pass; grad_multiplier (unscale times clip) is applied to the gradient first."""
        batch = AdamBatch()
        batch.add(planes, AdamScalars(hyper, grad_multiplier))
        self.adam_batch(batch)

    def adam_batch(self, batch: AdamBatch) -> None:
        """All the updates of a batch in one call: many small planes cost little more than one large one."""
        self._raise(lib.lk_adam(self._live(), batch.args, len(batch)))

    def squared_norm(self, n: int, *, src: int, dtype: DType) -> "array[float]":
        """The sum of squares of each block of NORM_BLOCK elements, a double; the last block may be shorter.

        The order inside a block is fixed; infinities and NaN show in the block's sum.
        """
        sums = array("d", bytes(8 * num_norm_blocks(n)))
        check_planes(n, (src, dtype.itemsize, "src"))
        self._raise(lib.lk_squared_norm(self._live(), n, src, dtype, sums.buffer_info()[0]))
        return sums

    def has_nonfinite(self, n: int, *, src: int, dtype: DType) -> bool:
        """Whether an infinity or a NaN is among n elements."""
        check_planes(n, (src, dtype.itemsize, "src"))
        rc = lib.lk_has_nonfinite(self._live(), n, src, dtype)
        self._raise(min(rc, 0))
        return rc == 1

    def accumulate(self, n: int, *, dst: int, src: int, src_dtype: DType, scale: float = 1.0, add: bool = True) -> None:
        """dst (fp32) += src * scale, or = with add=False; the product is rounded to fp32, then the sum."""
        check_planes(n, (dst, 4, "dst"), (src, src_dtype.itemsize, "src"))
        self._raise(lib.lk_accumulate(self._live(), n, dst, src, src_dtype, scale, add))

    def split_bf16(self, n: int, *, master: int, param: int, remainder: int) -> None:
        """Splits an fp32 master into bf16 param and int16 remainder = master bits - (param bits << 16).

        [Note: Ties of the split] param is the master rounded to nearest. A master exactly half-way between
        two bf16 values goes to the one of larger magnitude, not to the even one: an even param would have
        to stand for both of its half-way neighbours, 65,537 masters for 65,536 remainders, and one would be
        lost. NaN stays NaN.
        """
        check_planes(n, (master, 4, "master"), (param, 2, "param"), (remainder, 2, "remainder"))
        self._raise(lib.lk_split_bf16(self._live(), n, master, param, remainder))

    def merge_bf16(self, n: int, *, master: int, param: int, remainder: int) -> None:
        """Rebuilds the fp32 master (written) from bf16 param and int16 remainder."""
        check_planes(n, (master, 4, "master"), (param, 2, "param"), (remainder, 2, "remainder"))
        self._raise(lib.lk_merge_bf16(self._live(), n, master, param, remainder))

    def convert(self, n: int, *, src: int, src_dtype: DType, dst: int, dst_dtype: DType) -> None:
        """dst = src rounded to nearest even; NaN stays NaN. The planes must not overlap."""
        check_planes(n, (src, src_dtype.itemsize, "src"), (dst, dst_dtype.itemsize, "dst"))
        self._raise(lib.lk_convert(self._live(), n, src, src_dtype, dst, dst_dtype))

    def stream(self, n: int, *, source: Sequence[int], target: Sequence[int], non_temporal: bool = False) -> None:
        """Reads three fp32 planes, writes three (the same or others): the ceiling that benchmarks compare with."""
        if len(source) != 3 or len(target) != 3:
            raise ValueError(f"source and target must be 3 addresses each, not {len(source)} and {len(target)}")
        align = 64 if non_temporal else 4
        check_planes(n, *((a, align, "plane") for a in (*source, *target)))
        lists = ffi.new("uintptr_t[]", list(source)), ffi.new("uintptr_t[]", list(target))
        self._raise(lib.lk_stream(self._live(), n, *lists, non_temporal))

    def use_team(self) -> bool:
        """For a thread that computes with torch: its calls from now on run on the OpenMP threads that torch's
        operations on it run on, whenever those are num_threads. torch leaves them awake, and beside them the
        kernels' own threads would find no free core. True, or False where that cannot be: threads bound to
        cores, no torch in the process, a forked child. Replaces the thread that asked before."""
        rc = lib.lk_use_team(self._live())
        self._raise(min(rc, 0))
        return rc == 1

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


def copy_bytes(nbytes: int, *, dst: int, src: int) -> None:
    """Copies plain bytes in the calling thread, which gives up the GIL meanwhile. They must not overlap."""
    check_planes(nbytes, (dst, 1, "dst"), (src, 1, "src"))
    lib.lk_copy(dst, src, nbytes)


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
    """How many sums squared_norm gives for n elements."""
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

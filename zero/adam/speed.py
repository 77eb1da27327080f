"""How fast an update is whose planes pass through buffers: measured in a few dozen milliseconds."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from lamina.tiers import Plane

from .dtypes import KERNEL_DTYPE, STATE_PLANES, plane_dtype
from .kernels import AdamHyper, AdamPlanes, Kernels
from .sums import UpdateSums

NUMEL = 1 << 20
"""Of one buffer. Several take turns, as in the update, so that no cache holds them."""
BUFFERS = 3
ROUNDS = 5


def streamed_adam_rate(kernels: Kernels, dtype: torch.dtype, grad_dtype: torch.dtype) -> float:
    """Elements per second of Adam together with the checksums of what it writes, for parameters of ``dtype``."""
    specs = STATE_PLANES[dtype]
    buffers = [
        {spec.plane: torch.zeros(NUMEL, dtype=plane_dtype(spec.plane, dtype)) for spec in specs}
        | {Plane.GRAD: torch.ones(NUMEL, dtype=grad_dtype)}
        for _ in range(BUFFERS)
    ]
    hyper = AdamHyper(lr=1e-3, step=1)

    def update(planes: dict[Plane, torch.Tensor]) -> None:
        at = {plane: values.data_ptr() for plane, values in planes.items()}
        sums = UpdateSums(specs)
        kernels.adam(
            AdamPlanes(
                n=NUMEL,
                param=at[Plane.PARAM],
                param_dtype=KERNEL_DTYPE[dtype],
                grad=at[Plane.GRAD],
                grad_dtype=KERNEL_DTYPE[grad_dtype],
                exp_avg=at[Plane.EXP_AVG],
                exp_avg_sq=at[Plane.EXP_AVG_SQ],
                master=at.get(Plane.MASTER, 0),
                remainder=at.get(Plane.REMAINDER, 0),
                sums=sums.room(0, NUMEL),
            ),
            hyper,
        )

    return NUMEL / _median_s(update, buffers)


def _median_s(
    update: Callable[[dict[Plane, torch.Tensor]], None], buffers: Sequence[dict[Plane, torch.Tensor]]
) -> float:
    for planes in buffers:
        update(planes)
    taken = []
    for _ in range(ROUNDS):
        for planes in buffers:
            began = time.perf_counter()
            update(planes)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)

"""Which planes a compute dtype needs (DESIGN: bytes per trainable parameter) and how dtypes are named across layers."""

import torch

from lamina.tiers import Plane, PlaneSpec

from .kernels import DType

KERNEL_DTYPE = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}

STATE_PLANES: dict[torch.dtype, tuple[PlaneSpec, ...]] = {
    # The fp32 parameter is its own master.
    torch.float32: (
        PlaneSpec(plane=Plane.PARAM, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG_SQ, itemsize=4),
    ),
    # master bits = (param bits << 16) + remainder: 12 bytes instead of 14.
    torch.bfloat16: (
        PlaneSpec(plane=Plane.PARAM, itemsize=2),
        PlaneSpec(plane=Plane.REMAINDER, itemsize=2),
        PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG_SQ, itemsize=4),
    ),
    torch.float16: (
        PlaneSpec(plane=Plane.PARAM, itemsize=2),
        PlaneSpec(plane=Plane.MASTER, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG_SQ, itemsize=4),
    ),
}

CLIENT_PLANES: dict[torch.dtype, tuple[PlaneSpec, ...]] = {
    # For an optimizer of torch, which keeps its own state.
    torch.float32: (PlaneSpec(plane=Plane.PARAM, itemsize=4),),
    torch.bfloat16: (PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.MASTER, itemsize=4)),
    torch.float16: (PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.MASTER, itemsize=4)),
}

PLANE_DTYPE = {
    Plane.REMAINDER: torch.int16,
    Plane.MASTER: torch.float32,
    Plane.EXP_AVG: torch.float32,
    Plane.EXP_AVG_SQ: torch.float32,
}


def plane_dtype(plane: Plane, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of one plane's elements for parameters of ``compute_dtype``."""
    return compute_dtype if plane is Plane.PARAM else PLANE_DTYPE[plane]

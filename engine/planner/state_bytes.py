"""How many bytes each kind of state takes: the one source that engine and planner share (DESIGN section 5).

Pure arithmetic over plain numbers: no torch, no tiers, no files. Plane names are the values of
``lamina.tiers.Plane`` (a StrEnum, so its members are equal to these strings and can be used as keys here).
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from lamina.engine.planner.errors import PlanError

PAGE_BYTES = 4096
"""Alignment of every plane of every shard in a generation file, and of every arena block."""

ALIGN_ELEMENTS = 32
"""Every parameter starts on such a multiple in its group's flat layout: 64 bytes in half precision, 128 in
fp32.

One number for all planes, so that an element has the same offset in each of them.
"""

CHUNK_ELEMENTS = 1 << 19
"""Sub-groups are cut at multiples of this many elements: whole checksum chunks of every plane."""

PARAM = "param"
REMAINDER = "remainder"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRAD = "grad"
MOMENTS = frozenset({EXP_AVG, EXP_AVG_SQ})


class DType(StrEnum):
    """Compute dtype of a run."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Optimizer(StrEnum):
    """Optimizers by the moments that they keep."""

    ADAM = "adam"
    ADAMW = "adamw"
    LION = "lion"
    MOMENTUM = "momentum"
    ADAGRAD = "adagrad"
    SGD = "sgd"


TIERED = frozenset({Optimizer.ADAM, Optimizer.ADAMW})
"""Those of this engine, whose state may lie on any tier. The others are torch's: fp32 masters, and moments that are tensors of
torch's own in host memory."""


_ITEMSIZE = {DType.BF16: 2, DType.FP16: 2, DType.FP32: 4}
_MOMENTS = {
    Optimizer.ADAM: (EXP_AVG, EXP_AVG_SQ),
    Optimizer.ADAMW: (EXP_AVG, EXP_AVG_SQ),
    Optimizer.LION: (EXP_AVG,),
    Optimizer.MOMENTUM: (EXP_AVG,),
    Optimizer.ADAGRAD: (EXP_AVG,),
    Optimizer.SGD: (),
}


def as_dtype(value: str) -> DType:
    """``bf16``, ``fp16``, ``fp32`` or torch's spelling of them. Raises PlanError for any other."""
    aliases = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    name = str(value).removeprefix("torch.").lower()
    try:
        return DType(aliases.get(name, name))
    except ValueError:
        raise PlanError(f"dtype: {value!r} is unknown; write one of bf16, fp16, fp32") from None


def itemsize(dtype: str) -> int:
    """Bytes of one element of the compute dtype."""
    return _ITEMSIZE[as_dtype(dtype)]


def plane_bytes_per_param(dtype: str, optimizer: str = Optimizer.ADAMW) -> dict[str, int]:
    """Bytes of each plane per trainable parameter, gradients left out.

    bf16 keeps the fp32 master as its high half (``param``) and a 16-bit ``remainder``; fp16, and bf16 for optimizers of
    torch, keeps a separate ``master``; in fp32 the parameter is its own master. Adam: 12, 14 and 12 bytes in all.
    """
    kind = as_dtype(dtype)
    planes = {PARAM: _ITEMSIZE[kind]}
    if kind is DType.BF16 and optimizer in TIERED:
        planes[REMAINDER] = 2
    elif kind is not DType.FP32:
        planes[MASTER] = 4
    try:
        moments = _MOMENTS[Optimizer(optimizer)]
    except ValueError:
        known = ", ".join(Optimizer)
        raise PlanError(f"optimizer: {optimizer!r} is unknown; write one of {known}") from None
    planes.update(dict.fromkeys(moments, 4))
    return planes


def grad_bytes_per_param(dtype: str, accumulation: int = 1) -> int:
    """Bytes of a held gradient: the compute dtype for one micro-batch, fp32 once several are added up."""
    if accumulation < 1:
        raise PlanError(f"gradient_accumulation_steps: {accumulation} must be at least 1")
    return 4 if accumulation > 1 else itemsize(dtype)


def optimizer_bytes_per_param(dtype: str, optimizer: str = Optimizer.ADAMW) -> int:
    """Bytes of all planes except ``param``: what the optimizer alone needs."""
    planes = plane_bytes_per_param(dtype, optimizer)
    return sum(planes.values()) - planes[PARAM]


def update_read_bytes_per_param(dtype: str, optimizer: str = Optimizer.ADAMW) -> int:
    """State bytes that one optimizer step reads (the gradient apart): 12, 12, 12 with Adam.

    In fp16 the ``param`` plane is only written: it is the rounded master.
    """
    planes = plane_bytes_per_param(dtype, optimizer)
    return sum(planes.values()) - (planes[PARAM] if MASTER in planes else 0)


def update_write_bytes_per_param(dtype: str, optimizer: str = Optimizer.ADAMW) -> int:
    """State bytes that one optimizer step writes: all planes (12, 14, 12 with Adam)."""
    return sum(plane_bytes_per_param(dtype, optimizer).values())


def align_up(nbytes: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not below ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def flat_numel(numels: Iterable[int], ranks: int = 1) -> int:
    """Elements of a group's flat layout: parameters aligned, the end padded so that every rank owns as
    much."""
    return shard_numel(sum(align_up(numel, ALIGN_ELEMENTS) for numel in numels), ranks) * ranks


def shard_numel(group_numel: int, ranks: int, *, multiple: int = ALIGN_ELEMENTS) -> int:
    """Elements of one rank's shard of a group: an equal part, rounded up to ``multiple`` elements."""
    if ranks < 1:
        raise PlanError(f"ranks: {ranks} must be at least 1")
    return align_up(-(-group_numel // ranks), multiple) if group_numel else 0


def shard_plane_bytes(numel: int, planes: Mapping[str, int], *, page: int = PAGE_BYTES) -> int:
    """Bytes of one shard in a generation file: each plane contiguous and aligned to a page."""
    return sum(align_up(numel * size, page) for size in planes.values())


def generation_bytes(shard_numels: Iterable[int], planes: Mapping[str, int], *, page: int = PAGE_BYTES) -> int:
    """Bytes of one generation file of one rank."""
    return sum(shard_plane_bytes(numel, planes, page=page) for numel in shard_numels)


def nvme_bytes(
    shard_numels: Iterable[int], planes: Mapping[str, int], *, generations: int = 2, page: int = PAGE_BYTES
) -> int:
    """Bytes of all generation files of one rank: the current one and those being written or pinned."""
    if generations < 1:
        raise PlanError(f"generations: {generations} must be at least 1")
    return generations * generation_bytes(shard_numels, planes, page=page)


def staged_bytes_per_param(stage: int, ranks: int, *, param: float, grad: float, optimizer: float) -> float:
    """Bytes per parameter on one rank when ``stage`` decides what is split over ``ranks`` (ZeRO, equations
    1-3)."""
    if stage not in (0, 1, 2, 3):
        raise PlanError(f"stage: {stage} is unknown; write 0, 1, 2 or 3")
    if ranks < 1:
        raise PlanError(f"ranks: {ranks} must be at least 1")
    return (
        param / (ranks if stage >= 3 else 1)
        + grad / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )

"""Planes at chosen offsets, and one call of the kernel on them: what the tests of this folder share."""

from dataclasses import dataclass

import torch

from lamina.zero.adam.kernels import AdamHyper, AdamPlanes, DType, Kernels

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
INTEGER = {4: torch.int32, 2: torch.int16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, so that NaN equals NaN and -0 differs from 0."""
    return tensor.view(INTEGER[tensor.element_size()])


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of values that starts `offset` elements into its allocation, with guard elements behind it."""
    room = torch.full((values.numel() + offset + 64,), 7, dtype=values.dtype)
    room[offset : offset + values.numel()] = values
    return room[offset : offset + values.numel()]


def guards_intact(tensor: torch.Tensor, offset: int) -> bool:
    """Whether the elements around a tensor made by placed() are as they were."""
    storage = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())
    before, after = storage[:offset], storage[offset + tensor.numel() :]
    return bool((before == 7).all() and (after == 7).all())


@dataclass
class Planes:
    """All planes of one parameter; master and remainder only where the kind wants them."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None = None
    remainder: torch.Tensor | None = None

    def copy(self, begin: int = 0, end: int | None = None, offset: int = 0) -> "Planes":
        def piece(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else placed(t[begin:end], offset)

        return Planes(**{name: piece(t) for name, t in vars(self).items()})

    def written(self) -> list[torch.Tensor]:
        """What a step writes."""
        found = (self.param, self.exp_avg, self.exp_avg_sq, self.master, self.remainder)
        return [t for t in found if t is not None]


def dtype_of(tensor: torch.Tensor) -> DType:
    return next(d for d, t in TORCH.items() if t is tensor.dtype)


def run_adam(
    kernels: Kernels, planes: Planes, hyper: AdamHyper, multiplier: float = 1.0, adopt_param: bool = False
) -> None:
    kernels.adam(adam_planes(planes, adopt_param), hyper, multiplier)


def adam_planes(planes: Planes, adopt_param: bool = False) -> AdamPlanes:
    return AdamPlanes(
        n=planes.param.numel(),
        param=planes.param.data_ptr(),
        param_dtype=dtype_of(planes.param),
        grad=planes.grad.data_ptr(),
        grad_dtype=dtype_of(planes.grad),
        exp_avg=planes.exp_avg.data_ptr(),
        exp_avg_sq=planes.exp_avg_sq.data_ptr(),
        master=0 if planes.master is None else planes.master.data_ptr(),
        remainder=0 if planes.remainder is None else planes.remainder.data_ptr(),
        adopt_param=adopt_param,
    )


def random_planes(kind: str, grad_dtype: DType, numel: int, seed: int) -> Planes:
    """kind: fp32, split (bf16 + remainder), bf16 (bf16 + master) or fp16 (fp16 + master)."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(numel, generator=random)

    def spread() -> torch.Tensor:
        return 10.0 ** torch.randint(-6, 3, (numel,), generator=random)

    grad = (normal() * spread()).to(TORCH[grad_dtype])
    master = normal()
    planes = Planes(param=master, grad=grad, exp_avg=normal() * 0.1, exp_avg_sq=normal().square() * spread())
    if kind == "split":
        planes.param, planes.remainder = split(master)
    elif kind != "fp32":
        planes.param = master.to(torch.bfloat16 if kind == "bf16" else torch.float16)
        planes.master = master
    return planes


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The split in plain integers: nearest, half-way cases away from zero; NaN quiet with remainder 0."""
    whole = bits(master).to(torch.int64) & 0xFFFFFFFF
    high = ((whole + 0x8000) >> 16) & 0xFFFF
    rest = whole & 0xFFFF
    rest = torch.where(rest >= 0x8000, rest - 0x10000, rest)
    nan = master.isnan()
    high = torch.where(nan, whole >> 16 | 0x40, high)
    rest = torch.where(nan, 0, rest)
    high = torch.where(high >= 0x8000, high - 0x10000, high)
    return high.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def merge(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    whole = (bits(param).to(torch.int64) << 16) + remainder.to(torch.int64)
    whole = whole & 0xFFFFFFFF
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32).view(torch.float32)

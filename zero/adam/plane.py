"""A plane: a contiguous run of n elements at a raw address that its owner keeps alive. Needs no torch."""

import enum


class DType(enum.IntEnum):
    """Element type of a plane."""

    FP32 = 0
    BF16 = 1
    FP16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FP32 else 2


def check_planes(n: int, *planes: tuple[int, int, str]) -> None:
    """Raises ValueError for a negative n and for an address (address, alignment, name) that is null or misaligned."""
    if n < 0:
        raise ValueError(f"n = {n}: must not be negative")
    for address, align, name in planes:
        if address % align:
            raise ValueError(f"{name} = {address:#x}: must be a multiple of {align} bytes")
        if address == 0 and n > 0:
            raise ValueError(f"{name} is a null address for n = {n} elements")

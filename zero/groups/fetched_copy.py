"""Parameters of a group's fetched copy, as the update thread reads and renews them; see [Note: renewed copies].

The training thread may evict the copy at any moment: the tensor taken here keeps its memory from being reused meanwhile.
"""

import weakref

import torch

from lamina.zero.adam.kernels import copy_bytes

from .segment import Segment


def read_copy(segment: Segment, begin: int, end: int, into: memoryview) -> bool:
    """Take elements [begin, end) of this rank's shard from the fetched copy; False where there is none.

    The copy holds the current generation as the store does, until the update has written into it.
    """
    flat = segment.flat
    if flat is None or segment.device is not None or segment.in_place:
        return False
    _copy(torch.frombuffer(into, dtype=segment.dtype), segment.shard_of(flat)[begin:end])
    return True


def renew_copy(segment: Segment, copy: "weakref.ref[torch.Tensor]", begin: int, end: int, new: memoryview) -> bool:
    """Write new values of elements [begin, end) into a fetched copy; False where that has gone.

    It may even have been fetched again, with the old values, which must stay: hence the reference, which dies with the copy
    that it was made of.
    """
    flat = copy()
    if flat is None:
        return False
    values = torch.frombuffer(new, dtype=segment.dtype, count=end - begin)
    _copy(segment.shard_of(flat)[begin:end], values)
    return True


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Not by an operation of torch, which would start OpenMP threads for this thread beside those of the passes."""
    copy_bytes(values.nbytes, dst=target.data_ptr(), src=values.data_ptr())

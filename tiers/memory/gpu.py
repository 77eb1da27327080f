"""The device tier on a GPU: its memory, copies on streams of their own, page-locked host memory.

The only file of this layer that knows torch. With ``torch.device("cpu")`` everything runs without streams over ordinary
memory that is kept apart from the host tier: that is how the paths below are tested where there is no GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lamina.tiers.tier import Tier

from .arena import Arena, Block

MAX_ALIGN = 4096  # what blocks of an arena are aligned to


class DeviceMemory:
    """One reservation of device memory, exactly ``nbytes``; see arena.Memory."""

    page_kind = "device"

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes: torch.Tensor | None = torch.empty(nbytes + MAX_ALIGN, dtype=torch.uint8, device=device)
        self.address = -(-self._bytes.data_ptr() // MAX_ALIGN) * MAX_ALIGN

    def close(self) -> None:
        self._bytes = None


class _DeviceBytes:
    """A range of device memory as CUDA libraries exchange it; keeps the block's storage for as long as a tensor lives."""

    def __init__(self, block: Block, byte_offset: int, nbytes: int) -> None:
        self._storage = block.storage
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.address + byte_offset, False),
            "version": 3,
        }


class Accelerator:
    """A device beside the host: where compute runs, and how bytes get there and back.

    Copies run on two streams of their own. Results are events; ``None`` where there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type == "cuda"
        self._up = torch.cuda.Stream(device) if self.has_streams else None  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device) if self.has_streams else None  # type: ignore[no-untyped-call]

    # -- memory --------------------------------------------------------------------------------------------------------

    def arena(self, nbytes: int) -> Arena:
        """An arena of device memory. Raises torch's OutOfMemoryError when the device does not have it."""
        memory = DeviceMemory(nbytes, self.device) if nbytes else None
        return Arena(Tier.DEVICE, nbytes, memory=memory)

    def tensor_over(self, block: Block, dtype: torch.dtype, numel: int, byte_offset: int = 0) -> torch.Tensor:
        """A 1-d tensor over a block of the device arena."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.device)
        nbytes = numel * dtype.itemsize
        if not self.has_streams:
            return torch.frombuffer(block.view[byte_offset : byte_offset + nbytes], dtype=dtype)
        return torch.as_tensor(_DeviceBytes(block, byte_offset, nbytes), device=self.device).view(dtype)

    # -- copies --------------------------------------------------------------------------------------------------------

    def mark(self) -> Any:
        """An event after everything that compute has been given so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.has_streams else None

    def copy_up(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Begin to copy page-locked host memory to the device, once ``after`` has happened; returns the event of its end."""
        if self._up is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._up):
            self._up.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self._up.record_event()

    def copy_down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin to copy what compute has produced to page-locked host memory; returns the event of its end."""
        if self._down is None:
            target.copy_(source)
            return None
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._down)
            return self._down.record_event()

    def compute_waits_for(self, event: Any) -> None:
        """What compute is given from now on runs after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @staticmethod
    def has_happened(event: Any) -> bool:
        return event is None or bool(event.query())

    @staticmethod
    def wait(event: Any) -> None:
        """Block this thread until ``event`` has happened."""
        if event is not None:
            event.synchronize()

    # -- page-locking --------------------------------------------------------------------------------------------------

    @contextmanager
    def page_locked(self, arena: Arena) -> Iterator[None]:
        """Register the host arena with CUDA as it lies (torch's pinned allocator would round it up to a power of two).

        Raises RuntimeError with CUDA's reason, and what to do, when the system refuses.
        """
        if not self.has_streams or arena.nbytes == 0:
            yield
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(arena.address, arena.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(
                f"cudaHostRegister refused {arena.nbytes:,} bytes of the host tier: {status}. "
                f"Lower tiers.host_bytes, or raise the limit of locked memory (ulimit -l)"
            )
        try:
            yield
        finally:
            runtime.cudaHostUnregister(arena.address)

"""Where the inputs of blocks wait that are computed again in the backward pass: as they are, in host memory, or in a file.

[Note: saved inputs] Tensors that need a gradient (the stream of activations) are moved; all others (masks, positions) are
mostly the same object for every block and are kept as they are. What was moved is a copy, so that a later change in place
does no harm; what was not is checked for one.
"""

from collections import deque
from contextlib import ExitStack
from typing import Protocol

import torch

from lamina.aio_native import Handle, Priority
from lamina.tiers import Arena, Block, BudgetError, Tier
from lamina.tiers.memory.gpu import Accelerator
from lamina.tiers.nvme.unnamed import UnnamedFile
from lamina.zero.groups.memory import tensor_over

OWNER = "saved inputs"
GROWTH_BYTES = 64 << 20


class Kept(Protocol):
    """One tensor of a block's input."""

    def prefetch(self) -> None:
        """It will be wanted soon."""

    def tensor(self) -> torch.Tensor:
        """The values as they were, without a graph. Raises RuntimeError when they were changed in place meanwhile."""


class KeptAsItIs:
    """The tensor itself, and the version it had."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def prefetch(self) -> None:
        """It is here."""

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of shape {tuple(self._tensor.shape)} of a block that is computed again was changed in place "
                f"(version {self._tensor._version}, wanted {self._version}): use an out-of-place operation"
            )
        return self._tensor


class _LentMemory:
    """A block of an arena as the memory of a smaller one."""

    page_kind = "lent"

    def __init__(self, block: Block) -> None:
        self.address = block.address
        self._block = block

    def close(self) -> None:
        self._block.free()


def arena_within(arena: Arena, nbytes: int) -> Arena:
    """Part of an arena, set aside. Raises BudgetError when it is not free."""
    return Arena(arena.tier, nbytes, memory=_LentMemory(arena.alloc(nbytes, OWNER)))


class Room:
    """Host memory for saved inputs: what is left of an arena, or without a budget as much as it takes."""

    def __init__(self, arena: Arena | None, accelerator: Accelerator | None) -> None:
        """``arena``: None where there is no budget; it stays its owner's to close."""
        self._arenas = [arena] if arena is not None else []
        self._grows = arena is None
        self._accelerator = accelerator
        self._closing = ExitStack()

    def try_take(self, nbytes: int) -> Block | None:
        for arena in self._arenas:
            block = arena.try_alloc(nbytes, OWNER)
            if block is not None:
                return block
        if not self._grows:
            return None
        arena = Arena(Tier.HOST, max(nbytes, GROWTH_BYTES))
        self._closing.callback(arena.close)
        if self._accelerator is not None:
            self._closing.enter_context(self._accelerator.page_locked(arena))
        self._arenas.append(arena)
        return arena.alloc(nbytes, OWNER)

    def refusal(self, nbytes: int, remedy: str) -> BudgetError:
        free = sum(arena.free_bytes for arena in self._arenas)
        budget = sum(arena.nbytes for arena in self._arenas)
        return BudgetError(
            f"{OWNER}: an input of {nbytes:,} bytes wants host memory, of which {free:,} of {budget:,} are free. {remedy}",
            owner=OWNER,
            wanted=nbytes,
            free=free,
            budget=budget,
            largest=max((arena.largest_hole for arena in self._arenas), default=0),
        )

    def close(self) -> None:
        self._closing.close()
        self._arenas.clear()


class _Moved:
    """What both ways of moving a tensor share: its form, and the block of host memory that holds it or is to hold it."""

    def __init__(self, tensor: torch.Tensor, accelerator: Accelerator | None) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.accelerator = accelerator
        self.block: Block | None = None
        self.event: object = None

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def fill(self, block: Block, tensor: torch.Tensor) -> None:
        """Begin to copy the tensor into host memory."""
        self.block = block
        flat = tensor_over(block, self.dtype, self.shape.numel()).view(self.shape)
        if self.accelerator is None:
            flat.copy_(tensor.detach())
        else:
            self.event = self.accelerator.copy_down(flat, tensor.detach())

    def used_by_compute(self, block: Block) -> torch.Tensor:
        """The values where compute can read them."""
        flat = tensor_over(block, self.dtype, self.shape.numel()).view(self.shape)
        if self.accelerator is None:
            return flat
        Accelerator.wait(self.event)
        there = torch.empty(self.shape, dtype=self.dtype, device=self.accelerator.device)
        event = self.accelerator.copy_up(there, flat, self.accelerator.mark())
        self.accelerator.compute_waits_for(event)
        Accelerator.wait(event)  # the block goes back when this returns
        return there


class KeptInHost(_Moved):
    def prefetch(self) -> None:
        """It is where it can be had in time."""

    def tensor(self) -> torch.Tensor:
        if self.block is None:
            raise RuntimeError(f"{OWNER}: a tensor was never copied")
        return self.used_by_compute(self.block)


class KeptInFile(_Moved):
    """Written behind the forward pass, read ahead of the backward pass."""

    def __init__(self, tensor: torch.Tensor, owner: "InputsInFile", accelerator: Accelerator | None) -> None:
        super().__init__(tensor, accelerator)
        self.owner = owner
        self.offset: int | None = None
        self.handle: Handle | None = None
        self.on_disk = False

    def __del__(self) -> None:
        if getattr(self, "offset", None) is not None:
            self.owner.gave_up(self)

    def prefetch(self) -> None:
        self.owner.advance()
        if self.block is None:
            self._begin(Priority.PREFETCH, wait=False)

    def tensor(self) -> torch.Tensor:
        if self.block is None:
            self._begin(Priority.DEMAND, wait=True)
        if self.on_disk and self.handle is not None:
            self.handle.wait()
            self.handle = None
        block = self.block
        if block is None:
            raise RuntimeError(f"{OWNER}: a tensor was not fetched")
        if self.on_disk:
            self.block = None  # it can be read again; compute's tensor keeps the bytes for as long as it needs them
        return self.used_by_compute(block)

    def _begin(self, priority: Priority, *, wait: bool) -> None:
        block = self.owner.block(self.nbytes) if wait else self.owner.room.try_take(self.nbytes)
        if block is not None and self.offset is not None:
            self.block = block
            self.handle = self.owner.file.read(self.offset, block.view, priority)


class SavedInputs(Protocol):
    """Keeps tensors for the backward pass."""

    def keep(self, tensor: torch.Tensor) -> Kept: ...

    @property
    def file_bytes(self) -> int:
        """Bytes of disk taken."""

    def close(self) -> None: ...


class InputsAsTheyAre:
    file_bytes = 0

    def keep(self, tensor: torch.Tensor) -> Kept:
        return KeptAsItIs(tensor)

    def close(self) -> None:
        """Nothing is held."""


class InputsInHost:
    """Copies in host memory; see [Note: saved inputs]."""

    file_bytes = 0

    def __init__(self, room: Room, accelerator: Accelerator | None) -> None:
        self._room = room
        self._accelerator = accelerator

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Raises BudgetError when the host budget cannot hold it."""
        if not tensor.requires_grad or not tensor.numel():
            return KeptAsItIs(tensor)
        kept = KeptInHost(tensor, self._accelerator)
        block = self._room.try_take(kept.nbytes)
        if block is None:
            remedy = "Raise tiers.activation_bytes (or tiers.host_bytes), or write tiers.activations: nvme"
            raise self._room.refusal(kept.nbytes, remedy)
        kept.fill(block, tensor)
        return kept

    def close(self) -> None:
        self._room.close()


def _is_done(kept: KeptInFile) -> bool:
    return kept.handle is None or kept.handle.done()


class InputsInFile:
    """Copies in an unnamed file, by way of host memory; see [Note: saved inputs]."""

    def __init__(self, room: Room, file: UnnamedFile, accelerator: Accelerator | None) -> None:
        self.room = room
        self.file = file
        self._accelerator = accelerator
        self._copying: deque[KeptInFile] = deque()
        self._writing: deque[KeptInFile] = deque()

    @property
    def file_bytes(self) -> int:
        return self.file.nbytes

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Raises BudgetError when host memory does not have room for one copy or the path's quota is used up, OSError."""
        if not tensor.requires_grad or not tensor.numel():
            return KeptAsItIs(tensor)
        kept = KeptInFile(tensor, self, self._accelerator)
        block = self.block(kept.nbytes)
        kept.offset = self.file.take(kept.nbytes, OWNER)
        kept.fill(block, tensor)
        self._copying.append(kept)
        self.advance()
        return kept

    def block(self, nbytes: int) -> Block:
        """Host memory, waiting for writes under way when there is none. Raises BudgetError."""
        self.advance()
        while (block := self.room.try_take(nbytes)) is None:
            if not self._finish_one():
                raise self.room.refusal(nbytes, "Raise tiers.activation_bytes or tiers.host_bytes")
        return block

    def advance(self) -> None:
        """Begin to write what has come down, and let go of what is written; two writes may be under way."""
        while self._copying and Accelerator.has_happened(self._copying[0].event):
            self._write(self._copying.popleft())
        while self._writing and (len(self._writing) > 2 or _is_done(self._writing[0])):
            self._finish_one()

    def _write(self, kept: KeptInFile) -> None:
        if kept.block is not None and kept.offset is not None:
            kept.handle = self.file.write(kept.offset, kept.block.view)
            self._writing.append(kept)

    def _finish_one(self) -> bool:
        """Wait for the oldest write; False when there is none."""
        if not self._writing and self._copying:
            kept = self._copying.popleft()
            Accelerator.wait(kept.event)
            self._write(kept)
        if not self._writing:
            return False
        kept = self._writing.popleft()
        if kept.handle is not None:
            kept.handle.wait()
        kept.handle, kept.block, kept.on_disk = None, None, True
        return True

    def gave_up(self, kept: KeptInFile) -> None:
        """The tensor is not needed any more."""
        if kept.offset is not None:
            self.file.give_back(kept.offset, kept.nbytes, kept.handle)

    def close(self) -> None:
        while self._finish_one():
            pass
        self.file.close()
        self.room.close()

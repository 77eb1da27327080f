"""Where the inputs of blocks wait that are computed again in the backward pass: as they are, in host memory, or in a file.

[Note: saved inputs] Tensors that need a gradient (the stream of activations) are moved; all others (masks, positions) are
mostly the same object for every block and are kept as they are. What was moved is a copy, so that a later change in place
does no harm; what was not is checked for one.

[Note: inputs without room] Where no host memory was set aside for inputs (tiers.activation_bytes), they use what the placement
leaves of the budget; how much they take only a pass shows. One that finds no room goes to a file at once, and comes back
into memory of torch's when it is used. After the step state is moved to leave the room that was wanted, where it can be.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from lamina.aio_native import Handle, Priority
from lamina.tiers import Block
from lamina.tiers.memory.gpu import Accelerator
from lamina.tiers.nvme.unnamed import UnnamedFile
from lamina.tiers.placement.homes import page_up
from lamina.zero.groups.memory import tensor_over
from lamina.zero.groups.shard_planes import bytes_of

from .inputs_room import OWNER, Demand, Room

IN_PASSING = 3
"""Inputs that are on their way to a file or from it at a time."""


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


class KeptOnDisk:
    """In a file, with no host memory of its own; see [Note: inputs without room]."""

    def __init__(self, tensor: torch.Tensor, file: UnnamedFile) -> None:
        self._shape, self._dtype, self._file = tensor.shape, tensor.dtype, file
        self._nbytes = tensor.numel() * tensor.dtype.itemsize
        self._offset = file.take(self._nbytes, OWNER)
        weakref.finalize(self, file.give_back, self._offset, self._nbytes).atexit = False
        file.write(self._offset, bytes_of(tensor.detach().reshape(-1))).wait()

    def prefetch(self) -> None:
        """There is no memory that it could come into before it is used."""

    def tensor(self) -> torch.Tensor:
        return read_apart(self._file, self._offset, self._shape, self._dtype)


def read_apart(file: UnnamedFile, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a file in memory of torch's."""
    values = torch.empty(shape.numel(), dtype=dtype)
    file.read(offset, bytes_of(values), Priority.DEMAND).wait()
    return values.view(shape)


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
        if self.block is None and self.offset is not None:
            return read_apart(self.owner.file, self.offset, self.shape, self.dtype)
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

    @property
    def wanted_bytes(self) -> int:
        """Host memory that would have been enough so far."""

    @property
    def without_room_bytes(self) -> int:
        """The most that found no room in host memory at a time."""

    def close(self) -> None: ...


class InputsAsTheyAre:
    file_bytes = wanted_bytes = without_room_bytes = 0

    def keep(self, tensor: torch.Tensor) -> Kept:
        return KeptAsItIs(tensor)

    def close(self) -> None:
        """Nothing is held."""


class InputsInHost:
    """Copies in host memory; see [Note: saved inputs]. ``open_file`` makes a file for those that find no room there; without it
    they are refused."""

    def __init__(
        self, room: Room, accelerator: Accelerator | None, open_file: Callable[[], UnnamedFile] | None = None
    ) -> None:
        self._room = room
        self._accelerator = accelerator
        self._open_file = open_file
        self._file: UnnamedFile | None = None
        self._demand, self._without_room = Demand(), Demand()

    @property
    def file_bytes(self) -> int:
        return self._file.nbytes if self._file is not None else 0

    @property
    def wanted_bytes(self) -> int:
        return self._demand.most

    @property
    def without_room_bytes(self) -> int:
        return self._without_room.most

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Raises BudgetError when the host budget cannot hold it, and there is no file or its quota is used up, too; OSError."""
        if not tensor.requires_grad or not tensor.numel():
            return KeptAsItIs(tensor)
        kept: Kept
        block = self._room.try_take(tensor.nbytes)
        if block is not None:
            kept = in_host = KeptInHost(tensor, self._accelerator)
            in_host.fill(block, tensor)
        else:
            kept = KeptOnDisk(tensor, self._overflow(tensor.nbytes))
            self._without_room.count(kept, tensor.nbytes)
        self._demand.count(kept, tensor.nbytes)
        return kept

    def _overflow(self, nbytes: int) -> UnnamedFile:
        if self._open_file is None:
            remedy = "Raise tiers.activation_bytes (or tiers.host_bytes), or write tiers.activations: nvme"
            raise self._room.refusal(nbytes, remedy)
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._room.close()


def _is_done(kept: KeptInFile) -> bool:
    return kept.handle is None or kept.handle.done()


class InputsInFile:
    """Copies in an unnamed file, by way of host memory; see [Note: saved inputs]. ``needs_room``: without room for one copy it is
    refused, else it goes there straight."""

    def __init__(
        self, room: Room, file: UnnamedFile, accelerator: Accelerator | None, *, needs_room: bool = True
    ) -> None:
        self.room = room
        self.file = file
        self._accelerator = accelerator
        self._needs_room = needs_room
        self._largest = 0
        self._without_room = Demand()
        self._copying: deque[KeptInFile] = deque()
        self._writing: deque[KeptInFile] = deque()

    @property
    def file_bytes(self) -> int:
        return self.file.nbytes

    @property
    def wanted_bytes(self) -> int:
        return IN_PASSING * page_up(self._largest)

    @property
    def without_room_bytes(self) -> int:
        return self._without_room.most

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Raises BudgetError when host memory does not have room for one copy or the path's quota is used up, OSError."""
        if not tensor.requires_grad or not tensor.numel():
            return KeptAsItIs(tensor)
        self._largest = max(self._largest, tensor.nbytes)
        block = self.block(tensor.nbytes)
        if block is None:
            straight = KeptOnDisk(tensor, self.file)
            self._without_room.count(straight, tensor.nbytes)
            return straight
        kept = KeptInFile(tensor, self, self._accelerator)
        kept.offset = self.file.take(kept.nbytes, OWNER)
        kept.fill(block, tensor)
        self._copying.append(kept)
        self.advance()
        return kept

    def block(self, nbytes: int) -> Block | None:
        """Host memory, waiting for writes under way when there is none. Where there is none at all: BudgetError, or None."""
        self.advance()
        while (block := self.room.try_take(nbytes)) is None:
            if not self._finish_one():
                if not self._needs_room:
                    return None
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

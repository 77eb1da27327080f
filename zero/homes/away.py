"""Parameters of a model under construction whose values are kept elsewhere: in an unnamed file, or as this rank's part in memory.

[Note: away] The constructor of a large model runs before any engine knows its groups. What is built is put away at once:
the parameter becomes a NaN placeholder of its shape, and a weak table remembers where its values are, until initialize()
takes them to their homes. The table keeps neither alive.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lamina.zero.ranks.collectives import Ranks

ALONE = 2  # uses of a storage that only its parameter has: the tensor, and the object that is asked

_records: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


class Attic:
    """Where the bytes go: an unnamed file (mode 0600, gone with the process) in ``folder``, or memory when that is None."""

    def __init__(self, folder: str | None) -> None:
        self._file: int | None = None
        self._end = 0
        self._kept: dict[int, torch.Tensor] = {}
        if folder is not None:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._file = os.dup(file.fileno())

    @property
    def nbytes(self) -> int:
        """Bytes put in so far."""
        return self._end

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def reserve(self, nbytes: int) -> int:
        """Room for so many bytes: its offset."""
        offset, self._end = self._end, self._end + nbytes
        return offset

    def put(self, offset: int, values: torch.Tensor) -> None:
        """Keep a 1-d tensor's bytes at a reserved offset. Raises OSError with what was wanted when the disk is full."""
        if self._file is None:
            self._kept[offset] = values.clone()
            return
        view, done = _bytes(values), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], offset + done)

    def get(self, offset: int, into: torch.Tensor) -> None:
        """Fill a 1-d tensor with what was put. Raises OSError when the file is too short."""
        if self._file is None:
            into.copy_(self._kept[offset])
            return
        view, done = _bytes(into), 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], offset + done)
            if got == 0:
                raise OSError(f"the file of parameters under construction ends at {offset + done}, {len(view)} wanted")
            done += got

    def drop(self, offset: int) -> None:
        """The bytes are not needed any more."""
        self._kept.pop(offset, None)


@dataclass(kw_only=True)
class Record:
    """Where a parameter's values are. ``part_numel`` elements from ``offset`` on are this rank's; ``open``: the parameter
    is whole in memory at the moment, and that counts."""

    attic: Attic
    offset: int
    part_numel: int
    shape: torch.Size
    dtype: torch.dtype
    open: bool = False


def record_of(parameter: torch.Tensor) -> Record | None:
    return _records.get(parameter)  # type: ignore[no-untyped-call, no-any-return]


def is_away(parameter: torch.Tensor) -> bool:
    """Whether the values are elsewhere at the moment."""
    record = record_of(parameter)
    return record is not None and not record.open


def only_user(parameter: torch.Tensor) -> bool:
    """Whether no other tensor shares the parameter's memory, so that nobody can still edit it from outside."""
    uses: int = torch._C._storage_Use_Count(parameter.untyped_storage()._cdata)
    return uses <= ALONE


@torch.no_grad()
def put_away(parameter: nn.Parameter, attic: Attic, ranks: Ranks) -> None:
    """Keep this rank's part of the values, rank 0's where there are several, and leave a placeholder. Collective."""
    values = parameter.detach()
    ranks.broadcast(values)
    flat = values.reshape(-1)
    part = -(-flat.numel() // ranks.world_size)
    mine = flat[ranks.rank * part : (ranks.rank + 1) * part]
    record = record_of(parameter)
    if record is None or record.part_numel != part or record.dtype != flat.dtype:
        offset = attic.reserve(part * flat.itemsize)
        record = Record(attic=attic, offset=offset, part_numel=part, shape=values.shape, dtype=flat.dtype)
        _records[parameter] = record
    record.shape, record.open = values.shape, False
    attic.put(record.offset, mine)
    parameter.data = torch.full((), float("nan"), dtype=flat.dtype).expand(values.shape)


@torch.no_grad()
def bring_back(parameter: nn.Parameter, ranks: Ranks) -> None:
    """Make the parameter whole in memory. Collective."""
    record = record_of(parameter)
    if record is None or record.open:
        return
    numel = record.shape.numel()
    whole = torch.zeros(record.part_numel * ranks.world_size, dtype=record.dtype)
    first = ranks.rank * record.part_numel
    count = max(0, min(record.part_numel, numel - first))
    record.attic.get(record.offset, whole[first : first + count])
    ranks.sum_bits(whole)
    parameter.data = whole[:numel].view(record.shape)
    record.open = True


def forget(parameter: nn.Parameter) -> None:
    """The values live elsewhere now."""
    record = record_of(parameter)
    if record is not None:
        record.attic.drop(record.offset)
        del _records[parameter]


@contextmanager
def whole(parameters: Iterable[nn.Parameter], ranks: Ranks) -> Iterator[None]:
    """Bring back what is away; when the block succeeds, its parameters have another home and are forgotten here."""
    listed = [parameter for parameter in parameters if record_of(parameter) is not None]
    for parameter in listed:
        bring_back(parameter, ranks)
    yield
    for parameter in listed:
        forget(parameter)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]

"""A shard whose planes lie partly in host memory and partly on NVMe, read and written through one handle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.aio_native import Priority

from .arena import Arena, Block
from .errors import StoreError
from .nvme.handle import HandleGroup, as_bytes
from .nvme.store import GenerationStore
from .nvme.transaction import Transaction, TransactionState
from .split import SplitPiece, piece_name
from .tier import Plane, ShardSpec, Tier


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Bytes [begin, end) of a plane: in a block of memory, or a plane of one of the store's shards."""

    begin: int
    end: int
    block: Block | None
    stored_as: str


class SplitShard:
    """One shard as split_shard() laid it out. The host part is zero at first; close() gives its memory back.

    store: opened with what shard_on(shard, pieces, Tier.NVME) lists; its planes may be striped over several paths.

    The NVMe part is written out of place and counts from the commit on, but the host part is changed at once. So bytes
    that an open transaction has written cannot be read before its commit, and an abort after that leaves two steps mixed:
    both raise StoreError. A process that ends has lost the host part; a checkpoint has to keep it (`in_memory`).
    """

    def __init__(
        self, shard: ShardSpec, pieces: Sequence[SplitPiece], *, arena: Arena, store: GenerationStore | None
    ) -> None:
        """Raises BudgetError, ValueError for pieces that do not make up the shard or have no store to be in."""
        self.shard = shard
        self._store = store
        self._parts: dict[Plane, list[_Part]] = {}
        self._open: Transaction | None = None
        self._changed: dict[Plane, list[tuple[int, int]]] = {}
        try:
            for spec in shard.planes:
                own = sorted((piece for piece in pieces if piece.plane is spec.plane), key=lambda piece: piece.first)
                edges = [0, *(edge for piece in own for edge in (piece.first, piece.first + piece.numel)), shard.numel]
                if any(end != begin for end, begin in zip(edges[::2], edges[1::2], strict=True)):
                    raise ValueError(
                        f"{shard.name}/{spec.plane}: the pieces are not all of its {shard.numel:,} elements"
                    )
                self._parts[spec.plane] = [self._place(piece, spec.itemsize, arena) for piece in own]
        except BaseException:
            self.close()
            raise

    def _place(self, piece: SplitPiece, itemsize: int, arena: Arena) -> _Part:
        begin, end = piece.first * itemsize, (piece.first + piece.numel) * itemsize
        stored_as, block = "", None
        if piece.tier is Tier.NVME:
            stored_as = piece_name(self.shard, piece.first, piece.numel)
            if self._store is None or all(shard.name != stored_as for shard in self._store.shards):
                raise ValueError(f"{stored_as} is to be on nvme, but no store was opened with it")
        elif piece.tier is arena.tier:
            block = arena.alloc(end - begin, f"{self.shard.name}/{piece.plane}")
            block.view[:] = bytes(end - begin)
        else:
            raise ValueError(f"{self.shard.name}/{piece.plane}: {piece.tier} is neither nvme nor {arena.tier}")
        return _Part(begin=begin, end=end, block=block, stored_as=stored_as)

    def read(self, plane: Plane, buffer: Any, *, offset: int = 0, priority: Priority = Priority.DEMAND) -> HandleGroup:
        """Start reading from BYTE offset of a plane; what is in memory is copied at once. Raises KeyError, ValueError,
        StoreError."""
        view = as_bytes(buffer)
        self._settle(plane, offset, offset + len(view))
        handles, moved = [], 0
        for part, inside, piece in self._cut(plane, offset, view):
            if part.block is not None:
                piece[:] = part.block.view[inside : inside + len(piece)]
                moved += len(piece)
            else:
                handles.append(self._stored.read(part.stored_as, plane, piece, offset=inside, priority=priority))
        return HandleGroup(handles, moved=moved)

    def write(
        self,
        transaction: Transaction,
        plane: Plane,
        buffer: Any,
        *,
        offset: int = 0,
        priority: Priority = Priority.WRITE_BACK,
    ) -> HandleGroup:
        """Start writing a buffer at BYTE offset of a plane: to the transaction's generation, and to memory at once.

        Raises KeyError, ValueError, StoreError.
        """
        view = as_bytes(buffer)
        self._settle(plane, 0, 0)
        cuts = list(self._cut(plane, offset, view))
        if self._open not in (None, transaction):
            raise StoreError(f"{self.shard.name} is being written by another transaction, which is still open")
        self._open = transaction
        handles, moved = [], 0
        for part, inside, piece in cuts:
            if part.block is not None:
                self._changed.setdefault(plane, []).append((part.begin + inside, part.begin + inside + len(piece)))
                part.block.view[inside : inside + len(piece)] = piece
                moved += len(piece)
            else:
                handles.append(transaction.write(part.stored_as, plane, piece, offset=inside, priority=priority))
        return HandleGroup(handles, moved=moved)

    def in_memory(self, plane: Plane) -> list[tuple[int, memoryview]]:
        """(byte offset in the plane, bytes) of what is in memory: to be used where it is, or put in a checkpoint."""
        return [(part.begin, part.block.view) for part in self._parts[plane] if part.block is not None]

    def close(self) -> None:
        """Give the memory back. Harmless when repeated."""
        for part in (part for parts in self._parts.values() for part in parts):
            if part.block is not None:
                part.block.free()

    @property
    def _stored(self) -> GenerationStore:
        if self._store is None:
            raise StoreError(f"{self.shard.name} has no store")
        return self._store

    def _cut(self, plane: Plane, offset: int, view: memoryview) -> Iterator[tuple[_Part, int, memoryview]]:
        """The parts that bytes of a plane lie in: part, byte offset in it, and the piece of the buffer."""
        nbytes, end = self.shard.plane_bytes(plane), offset + len(view)
        if offset < 0 or end > nbytes:
            raise ValueError(f"{self.shard.name}/{plane}: bytes {offset:,} to {end:,} asked for, it has {nbytes:,}")
        for part in self._parts[plane]:
            first, last = max(part.begin, offset), min(part.end, end)
            if first < last:
                yield part, first - part.begin, view[first - offset : last - offset]

    def _settle(self, plane: Plane, begin: int, end: int) -> None:
        """Forget a transaction that is committed; refuse bytes that an open one has changed. Raises StoreError."""
        if self._open is not None and self._open.state is TransactionState.COMMITTED:
            self._open = None
            self._changed.clear()
        if self._open is not None and self._open.state is TransactionState.ABORTED:
            if any(self._changed.values()):
                raise StoreError(
                    f"{self.shard.name}: an update was aborted after its host part was changed, so that two steps are mixed: "
                    "load a checkpoint"
                )
            self._open = None
        if any(first < end and begin < last for first, last in self._changed.get(plane, ())):
            raise StoreError(
                f"{self.shard.name}/{plane}: bytes {begin:,} to {end:,} belong to an update that is not committed"
            )

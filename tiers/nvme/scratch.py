"""Scratch files in a rank's folders: bytes that need not outlive the process, such as gradients beyond the host budget."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial

from lamina.aio_native import AsyncIO, File, Priority
from lamina.tiers.nvme.folder import RankFolder
from lamina.tiers.nvme.handle import TransferHandle, as_bytes, started
from lamina.tiers.nvme.striping import deal, stripe_counts

SCRATCH_NAME = "scratch.bin"
PIECE_BYTES = 1 << 20  # what is dealt to the paths


class Scratch:
    """A space of fixed size, dealt to one file in each folder in proportion to the weights. The files' names are gone as soon
    as they are open, so that nothing is left behind, also by kill -9.

    Raises OSError (path, offset, wanted, got) when a disk is full at the start, or fails later.
    """

    def __init__(self, folders: Sequence[RankFolder], weights: Sequence[float], io: AsyncIO, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes_written = 0
        self.bytes_read = 0
        self._io = io
        self._pattern = deal(stripe_counts(weights))
        self._before: list[tuple[int, ...]] = []  # pieces of every stripe before each place of the pattern
        counted = [0] * len(folders)
        for stripe in self._pattern:
            self._before.append(tuple(counted))
            counted[stripe] += 1
        self._per_period = tuple(counted)
        self._files: dict[int, File] = {}
        with contextlib.ExitStack() as undo:
            for stripe, folder in enumerate(folders):
                if size := self._stripe_bytes(stripe):
                    self._files[stripe] = self._open(folder, size)
                    undo.callback(self._files[stripe].close)
            self._closing = undo.pop_all()

    def start_write(self, offset: int, view: memoryview) -> TransferHandle:
        """Begin to write bytes, which must not change until it is done. Raises ValueError beyond the end."""
        self.bytes_written += view.nbytes
        return self._start(offset, as_bytes(view), write=True)

    def start_read(self, offset: int, view: memoryview) -> TransferHandle:
        """Begin to fill the view. Raises ValueError beyond the end."""
        self.bytes_read += view.nbytes
        return self._start(offset, as_bytes(view), write=False)

    def close(self) -> None:
        """Give the disk space back. Harmless when repeated."""
        self._closing.close()

    # -- where the bytes are ---------------------------------------------------------------------------------------------

    def _open(self, folder: RankFolder, nbytes: int) -> File:
        path = folder.file(SCRATCH_NAME)
        folder.remove([SCRATCH_NAME])
        try:
            return self._io.open(path, writable=True, create=True, exclusive=True, size=nbytes)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _start(self, offset: int, view: memoryview, *, write: bool) -> TransferHandle:
        if offset < 0 or offset + view.nbytes > self.nbytes:
            raise ValueError(f"scratch file: bytes {offset} to {offset + view.nbytes} of {self.nbytes} were asked for")
        start, priority = (self._io.write, Priority.WRITE_BACK) if write else (self._io.read, Priority.DEMAND)
        parts = []
        for stripe, where, begin, end in self._pieces(offset, view.nbytes):
            begun = partial(start, self._files[stripe], view[begin:end], where, priority=priority)
            parts.append(started(stripe, begun))
        return TransferHandle(parts, view)

    def _pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(stripe, offset in its file, begin and end in the buffer) of every piece of a transfer."""
        begin = 0
        while begin < nbytes:
            index, inside = divmod(offset + begin, PIECE_BYTES)
            end = min(nbytes, begin + PIECE_BYTES - inside)
            stripe, before = self._place(index)
            yield stripe, before * PIECE_BYTES + inside, begin, end
            begin = end

    def _place(self, piece: int) -> tuple[int, int]:
        """The stripe of a piece, and how many pieces lie before it there."""
        period, position = divmod(piece, len(self._pattern))
        stripe = self._pattern[position]
        return stripe, period * self._per_period[stripe] + self._before[position][stripe]

    def _stripe_bytes(self, stripe: int) -> int:
        """Size of the stripe's file: all of its pieces, the last one perhaps cut."""
        pieces = -(-self.nbytes // PIECE_BYTES)
        period, position = divmod(pieces, len(self._pattern))
        before = self._before[position][stripe] if position else 0
        nbytes = (period * self._per_period[stripe] + before) * PIECE_BYTES
        last = self._place(pieces - 1)[0] if pieces else -1
        return nbytes - (pieces * PIECE_BYTES - self.nbytes) if stripe == last else nbytes

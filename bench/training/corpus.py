"""Text to train on: the standard library's sources or a user's files, split and batched deterministically."""

import os
import random
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

LARGEST_CORPUS_BYTES = 64_000_000
LARGEST_BLOCK_BYTES = 1 << 16
HELD_OUT_EVERY = 16
"""One block in so many is held out."""
_HELD_OUT_AT = HELD_OUT_EVERY // 2


class CorpusError(ValueError):
    """A text that cannot be trained on; names the path and what to do."""


class Batch(NamedTuple):
    """Bytes and the bytes that follow them."""

    tokens: Tensor
    """(batch, seq) int64"""
    targets: Tensor
    """(batch, seq) int64, the tokens one place on"""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text cut into equal blocks, one in sixteen held out, so that both parts come from all of it.

    A window lies within one block. All reads are functions of their arguments alone.
    """

    source: str
    """Where the text came from, for people."""
    num_files: int
    skipped_files: int
    """Files of a folder left out: binary, empty, unreadable, or beyond LARGEST_CORPUS_BYTES."""
    text: Tensor
    """uint8, one dimension"""

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """Read a file, all text files below a folder, or (None) the standard library's sources.

        Raises CorpusError for an empty or binary text, OSError for one that cannot be read.
        """
        root = Path(path) if path is not None else standard_library()
        text = bytearray()
        if root.is_dir():
            num_files, skipped = _read_folder(root, text, suffix=".py" if path is None else "")
        else:
            num_files, skipped = 1, 0
            text += _read_file(root, LARGEST_CORPUS_BYTES)
        if not text:
            found = f"{skipped} files, all of them empty, binary or unreadable" if skipped else "no files"
            raise CorpusError(f"no text in {root}: found {found}; name a file or folder of plain text with --text")
        return cls(
            source=f"{root}" if path is not None else f"the standard library's sources in {root}",
            num_files=num_files,
            skipped_files=skipped,
            text=torch.frombuffer(text, dtype=torch.uint8),
        )

    @property
    def block_bytes(self) -> int:
        return min(LARGEST_BLOCK_BYTES, len(self.text) // HELD_OUT_EVERY)

    @property
    def num_held_out_blocks(self) -> int:
        whole = len(self.text) // max(1, self.block_bytes)
        return (whole + HELD_OUT_EVERY - 1 - _HELD_OUT_AT) // HELD_OUT_EVERY

    @property
    def num_training_blocks(self) -> int:
        return len(self.text) // max(1, self.block_bytes) - self.num_held_out_blocks

    def require(self, seq: int) -> None:
        """CorpusError unless a block holds at least two windows of `seq` + 1 bytes."""
        if self.block_bytes >= 2 * (seq + 1):
            return
        if 2 * (seq + 1) > LARGEST_BLOCK_BYTES:
            raise CorpusError(f"--seq {seq} is too long: at most {LARGEST_BLOCK_BYTES // 2 - 1}")
        raise CorpusError(
            f"{self.source} is too small: it has {len(self.text)} bytes and --seq {seq} needs at least "
            f"{2 * (seq + 1) * HELD_OUT_EVERY}; give more text or a smaller --seq"
        )

    def training_batch(self, *, seed: int, step: int, micro: int, batch: int, seq: int) -> Batch:
        """Micro-batch `micro` of optimizer step `step`: windows drawn by seed, step and micro alone."""
        draw = random.Random(f"train {seed} {step} {micro}")
        numbers = [draw.randrange(self.num_training_blocks) for _ in range(batch)]
        return self._windows(draw, [_training_block(number) for number in numbers], seq)

    def held_out_batches(self, *, count: int, batch: int, seq: int) -> Iterator[Batch]:
        """The same `count` batches every time, whatever the seed, so that runs can be compared."""
        for number in range(count):
            draw = random.Random(f"held out {number}")
            numbers = [draw.randrange(self.num_held_out_blocks) for _ in range(batch)]
            yield self._windows(draw, [_held_out_block(number) for number in numbers], seq)

    def prompt(self, *, seed: int, length: int) -> bytes:
        """At most `length` bytes of held-out text from the start of a function or else of a line."""
        draw = random.Random(f"prompt {seed}")
        block = b""
        for number in draw.sample(range(self.num_held_out_blocks), self.num_held_out_blocks):
            start = _held_out_block(number) * self.block_bytes
            block = self.text[start : start + self.block_bytes].numpy().tobytes()
            function = block.find(b"\ndef ", 0, len(block) - length)
            if function >= 0:
                return block[function + 1 : function + 1 + length]
        line = block.find(b"\n", 0, len(block) - length) + 1
        return block[line : line + length]

    def _windows(self, draw: random.Random, blocks: list[int], seq: int) -> Batch:
        size = self.block_bytes
        starts = [block * size + draw.randrange(size - seq) for block in blocks]
        rows = torch.stack([self.text[start : start + seq + 1] for start in starts]).long()
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _held_out_block(number: int) -> int:
    return number * HELD_OUT_EVERY + _HELD_OUT_AT


def _training_block(number: int) -> int:
    """The number-th block that is not held out."""
    group, place = divmod(number, HELD_OUT_EVERY - 1)
    return group * HELD_OUT_EVERY + place + (place >= _HELD_OUT_AT)


def standard_library() -> Path:
    """The folder of the running interpreter's library sources. CorpusError where they are not installed."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise CorpusError(f"this Python has no library sources at {folder}: name a text with --text FILE_OR_DIR")
    return folder


def _is_text(data: bytes) -> bool:
    """Whether bytes look like text in some encoding: no NUL and hardly any other control characters."""
    head = data[:8192]
    controls = sum(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in head)
    return 0 not in head and controls * 100 <= len(head)


def _read_file(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a text file. CorpusError when it is no text, OSError when unreadable."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CorpusError(f"{path} is neither a regular file nor a folder: name a text with --text FILE_OR_DIR")
    with path.open("rb") as file:
        data = file.read(limit)
    if not data:
        raise CorpusError(f"{path} is empty: name a file or folder of plain text with --text")
    if not _is_text(data):
        raise CorpusError(f"{path} is a binary file: name a file or folder of plain text with --text")
    return data


def _read_folder(root: Path, text: bytearray, *, suffix: str) -> tuple[int, int]:
    """Append the text files below a folder in the order of their names; returns how many were taken and not.

    Hidden files and folders, installed packages and symbolic links are passed over. OSError when the folder
    itself cannot be listed.
    """
    taken = skipped = 0
    os.scandir(root).close()  # os.walk is silent about a folder that may not be read
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and "-packages" not in name)
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not name.endswith(suffix) or path.is_symlink():
                continue
            room = LARGEST_CORPUS_BYTES - len(text)
            try:
                data = _read_file(path, room) if room else b""
            except (CorpusError, OSError):
                data = b""
            text += data
            taken += bool(data)
            skipped += not data
    return taken, skipped

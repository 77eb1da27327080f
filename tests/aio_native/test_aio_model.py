"""Random programs against a plain model in memory: reads, writes, cancels, errors, reopening, closes.

Short by default; with `-m slow` two minutes, or LAMINA_FUZZ_SECONDS.
"""

import itertools
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lamina.aio_native import (
    AlignedBuffer,
    AsyncIO,
    CancelledIOError,
    Handle,
    Priority,
    Read,
    ShortIOError,
    Write,
)

SPAN = 100_000
SLOTS = 8
OFFSETS = st.one_of(st.integers(0, SPAN), st.sampled_from([0, 511, 512, 4095, 4096, 4097, 8192, 20_000]))
LENGTHS = st.one_of(st.integers(0, SPAN), st.integers(0, 64), st.sampled_from([512, 4096, 4097, 8192, 12_288, 16_384]))
PRIORITIES = st.sampled_from(list(Priority))
FUZZ_S = float(os.environ.get("LAMINA_FUZZ_SECONDS", "120"))


class FileModel(RuleBasedStateMachine):
    """One file and a bytearray that must stay equal. Transfers in flight never overlap: their order is not promised."""

    backend = "threads"

    def __init__(self) -> None:
        super().__init__()
        self.model = bytearray()
        self.folder = tempfile.TemporaryDirectory(prefix="lamina-model-")
        self.path = Path(self.folder.name) / "file"
        self.pending: list[tuple[Handle, int, int, memoryview | None]] = []
        """(handle, start, end, memory to compare for reads) of what may be in flight"""
        self.memory = AlignedBuffer(1 << 20)
        self.seed = 0
        self.turn = 0

    @initialize(block=st.sampled_from([4096, 16_384]), depth=st.integers(1, 6), inline=st.sampled_from([0, 8192]))
    def begin(self, block: int, depth: int, inline: int) -> None:
        self.io = AsyncIO(backend=self.backend, block_bytes=block, queue_depth=depth, inline_bytes=inline)  # type: ignore[arg-type]
        self.io.register(self.memory.view)
        self.file = self.io.open(self.path, create=True)

    def content(self, nbytes: int) -> bytes:
        self.seed += 1
        return (self.seed.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]

    def place(self, nbytes: int, shift: int) -> memoryview:
        """Memory for one transfer, at some alignment; no two in flight share a slot."""
        self.turn += 1
        if self.turn % SLOTS == 0:
            self.drain()
        slot = self.turn % SLOTS * (1 << 17)
        return self.memory.view[slot + shift : slot + shift + nbytes]

    def settle_overlaps(self, start: int, end: int) -> None:
        """Waits for what touches the range."""
        for entry in list(self.pending):
            if entry[1] < end and start < entry[2]:
                self.settle(entry)

    def settle(self, entry: tuple[Handle, int, int, memoryview | None]) -> None:
        self.pending.remove(entry)
        handle, start, end, memory = entry
        inside = max(0, min(end, len(self.model)) - start)
        if memory is not None and inside < end - start:
            with pytest.raises(ShortIOError) as caught:
                handle.wait()
            assert (caught.value.got, caught.value.wanted) == (inside, end - start)
        else:
            assert handle.wait() == end - start
        if memory is not None:
            assert memory[:inside] == self.model[start : start + inside]

    @rule(offset=OFFSETS, nbytes=LENGTHS, shift=st.sampled_from([0, 1, 512]), priority=PRIORITIES)
    def write(self, offset: int, nbytes: int, shift: int, priority: Priority) -> None:
        # Where a write makes the file longer, reads beyond the old end depend on the order.
        grows = offset + nbytes > len(self.model)
        self.settle_overlaps(0 if grows else offset, 1 << 62 if grows else offset + nbytes)
        memory = self.place(nbytes, shift)
        memory[:] = self.content(nbytes)
        handle = self.io.write(self.file, memory, offset, priority=priority)
        self.pending.append((handle, offset, offset + nbytes, None))
        if nbytes:
            self.model.extend(bytes(max(0, offset + nbytes - len(self.model))))
            self.model[offset : offset + nbytes] = memory
        if grows:
            self.settle(self.pending[-1])

    @rule(offset=OFFSETS, nbytes=LENGTHS, shift=st.sampled_from([0, 1, 512]), priority=PRIORITIES)
    def read(self, offset: int, nbytes: int, shift: int, priority: Priority) -> None:
        self.settle_overlaps(offset, offset + nbytes)
        memory = self.place(nbytes, shift)
        handle = self.io.read(self.file, memory, offset, priority=priority)
        self.pending.append((handle, offset, offset + nbytes, memory))

    @rule(cuts=st.lists(st.integers(0, SPAN), min_size=2, max_size=6, unique=True))
    def vectored(self, cuts: list[int]) -> None:
        self.drain()
        cuts.sort()
        spans = list(itertools.pairwise(cuts))
        data = [self.content(b - a) for a, b in spans]
        self.io.submit([Write(self.file, d, a) for (a, _), d in zip(spans, data, strict=True)]).wait()
        self.model.extend(bytes(max(0, cuts[-1] - len(self.model))))
        for (a, b), d in zip(spans, data, strict=True):
            self.model[a:b] = d
        back = [bytearray(b - a) for a, b in spans]
        self.io.submit([Read(self.file, m, a) for (a, _), m in zip(spans, back, strict=True)]).wait()
        assert back == data

    @rule(offset=OFFSETS, nbytes=LENGTHS)
    def cancel_a_write(self, offset: int, nbytes: int) -> None:
        self.drain()
        data = self.content(nbytes)
        handle = self.io.write(self.file, data, offset)
        dropped = handle.cancel()
        if dropped:
            with pytest.raises(CancelledIOError):
                handle.wait()
        moved = handle.wait()
        assert (moved == nbytes) or dropped
        back = bytearray(moved)
        assert self.io.read(self.file, back, offset).wait() == moved
        assert back == data[:moved]
        # How much was written is a matter of luck; the rest of the program must not depend on it.
        self.io.write(self.file, data, offset).wait()
        if nbytes:
            self.model.extend(bytes(max(0, offset + nbytes - len(self.model))))
            self.model[offset : offset + nbytes] = data

    @rule(nbytes=st.integers(0, SPAN))
    def truncate(self, nbytes: int) -> None:
        self.drain()
        os.truncate(self.path, nbytes)
        self.model = self.model[:nbytes] + bytes(max(0, nbytes - len(self.model)))

    @rule()
    def sync(self) -> None:
        self.io.fsync(self.file).wait()

    @rule(direct=st.sampled_from([None, False]))
    def reopen(self, direct: bool | None) -> None:
        self.file.close()  # waits
        self.drain()
        self.file = self.io.open(self.path, writable=True, direct=direct)

    @rule(wait=st.booleans())
    def close_the_engine(self, wait: bool) -> None:
        if wait:
            self.drain()
        self.io.close()
        self.drain()
        self.begin(4096, 3, 0)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def wait_for_one(self, data: st.DataObject) -> None:
        self.settle(self.pending[data.draw(st.integers(0, len(self.pending) - 1))])

    def drain(self) -> None:
        for entry in list(self.pending):
            self.settle(entry)

    def teardown(self) -> None:
        try:
            if hasattr(self, "io"):
                self.drain()
                assert self.file.size == len(self.model)
                self.io.close()
                assert self.path.read_bytes() == self.model
        finally:
            self.memory.close()
            self.folder.cleanup()


def run(backend: str, examples: int, steps: int) -> None:
    machine = type("Machine", (FileModel,), {"backend": backend})
    checks = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=checks,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        ),
    )


def test_random_programs_match_the_model(backend: str) -> None:
    run(backend, 12, 30)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 300)
def test_random_programs_match_the_model_for_minutes(backend: str) -> None:
    end = time.monotonic() + FUZZ_S
    while time.monotonic() < end:
        run(backend, 50, 60)

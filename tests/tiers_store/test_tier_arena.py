"""Arenas: exact budgets, bytes that go back with the last view, no growth over time."""

import ctypes
import gc
import mmap
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.tiers.errors import BudgetError
from lamina.tiers.memory.arena import Arena, Block
from lamina.tiers.tier import Tier

MIB = 1 << 20


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of the pages of a range that are in memory."""
    pages = -(-nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), vector) == 0, ctypes.get_errno()
    return sum(page & 1 for page in bytes(vector)) * mmap.PAGESIZE


def process_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_block_is_exact_aligned_and_writable() -> None:
    with Arena(Tier.HOST, MIB) as arena:
        blocks = [arena.alloc(nbytes, f"owner {nbytes}") for nbytes in (1, 4095, 4096, 4097, 100_003)]
        assert arena.used == sum(block.nbytes for block in blocks) == 112_292
        for number, block in enumerate(blocks):
            assert block.address % 4096 == 0
            assert len(block.view) == block.nbytes
            block.view[:] = bytes([number]) * block.nbytes
            assert ctypes.string_at(block.address, block.nbytes) == bytes([number]) * block.nbytes
        assert [set(block.view) for block in blocks] == [{0}, {1}, {2}, {3}, {4}]
        packed = [arena.alloc(3, "small", align=1) for _ in range(3)]
        assert packed[1].address - packed[0].address == 3


@pytest.mark.parametrize("kind", ["memoryview", "torch", "numpy", "slice"])
def test_bytes_go_back_with_the_last_view(kind: str) -> None:
    arena = Arena(Tier.DEVICE, 1 << 16)
    block = arena.alloc(5000, "a")
    view = block.view
    holder: object
    if kind == "torch":
        holder = torch.frombuffer(view, dtype=torch.uint8)[10:20]
    elif kind == "numpy":
        holder = numpy.frombuffer(view, dtype=numpy.uint8)[10:20]
    else:
        holder = view[10:20] if kind == "slice" else view
    del view
    block.free()
    block.free()
    assert block.freed
    with pytest.raises(ValueError, match=r"block of a \(5,000 bytes\) was freed"):
        _ = block.view
    assert arena.used == 5000
    assert arena.try_alloc(1 << 16, "b") is None
    del holder
    assert arena.used == 0
    assert arena.largest_hole == 1 << 16
    arena.alloc(1 << 16, "b")


def test_a_dropped_block_goes_back_too() -> None:
    arena = Arena(Tier.HOST, 1 << 16)
    block: Block | None = arena.alloc(4096, "a")
    assert arena.used == 4096
    del block
    assert arena.used == 0


def test_a_cycle_is_collected() -> None:
    arena = Arena(Tier.HOST, 1 << 16)
    box: list[object] = [arena.alloc(4096, "a").view]
    box.append(box)
    del box
    gc.collect()
    assert arena.used == 0


def test_a_refusal_shows_the_numbers() -> None:
    arena = Arena(Tier.HOST, 10 * 4096)
    first = arena.alloc(4 * 4096, "moments of block 0")
    second = arena.alloc(2 * 4096, "staging")
    third = arena.alloc(4096, "moments of block 0")
    second.free()
    with pytest.raises(BudgetError) as caught:
        arena.alloc(5 * 4096, "parameters")
    error = caught.value
    assert (error.owner, error.wanted, error.budget) == ("parameters", 20480, 40960)
    assert (error.free, error.largest) == (20480, 12288)
    for said in (
        "parameters wants 20,480",
        "budget 40,960",
        "used 20,480",
        "largest hole 12,288",
        "no hole is large enough",
    ):
        assert said in str(error)
    assert "moments of block 0 20,480" in str(error)
    assert "tiers.host_bytes" in str(error)
    with pytest.raises(BudgetError, match="the budget is full"):
        arena.alloc(40961, "parameters")
    assert isinstance(error, MemoryError)
    assert first.nbytes + third.nbytes == arena.used


def test_the_report_is_the_books() -> None:
    arena = Arena(Tier.HOST, MIB)
    a, b, c = arena.alloc(100, "a"), arena.alloc(300, "b"), arena.alloc(250, "a")
    report = arena.report()
    assert (report.used, report.peak, report.by_owner) == (650, 650, {"a": 350, "b": 300})
    b.free()
    report = arena.report()
    assert (report.used, report.peak, report.by_owner) == (350, 650, {"a": 350})
    assert report.page_kind in ("hugetlb", "thp", "small")
    assert report.as_dict()["used"] == 350
    assert "350 of 1,048,576 bytes used, peak 650" in str(report)
    assert a.nbytes + c.nbytes == 350


@pytest.mark.parametrize("nbytes", [int(1.1 * 2**power) for power in (20, 22, 23, 24, 25)])
def test_no_rounding_to_a_power_of_two(nbytes: int) -> None:
    """B-01: resident memory is at most 5 % above what was asked for, and nothing before it is used."""
    arena = Arena(Tier.HOST, nbytes, huge_pages=False)
    block = arena.alloc(nbytes, "all")
    assert resident_bytes(block.address, nbytes) == 0
    before = process_bytes()
    ctypes.memset(block.address, 1, nbytes)
    assert nbytes <= resident_bytes(block.address, nbytes) < nbytes + mmap.PAGESIZE
    assert process_bytes() - before <= nbytes * 1.05
    assert arena.try_alloc(1, "one more") is None


def test_a_huge_budget_costs_nothing_until_used() -> None:
    before = process_bytes()
    arena = Arena(Tier.HOST, 1 << 33)
    block = arena.alloc(1 << 32, "half")
    assert block.view.nbytes == arena.free_bytes == 1 << 32
    assert process_bytes() - before <= 4 << 20


def test_nothing_is_allowed_too() -> None:
    with Arena(Tier.HOST, 0) as arena:
        empty = arena.alloc(0, "empty")
        assert len(empty.view) == 0
        with pytest.raises(BudgetError):
            arena.alloc(1, "a")
    with pytest.raises(ValueError, match="budget is -1"):
        Arena(Tier.HOST, -1)
    with Arena(Tier.HOST, 4096) as arena:
        with pytest.raises(ValueError, match="wanted -1"):
            arena.alloc(-1, "a")
        with pytest.raises(ValueError, match="power of two"):
            arena.alloc(1, "a", align=3)


def test_views_outlive_a_closed_arena() -> None:
    arena = Arena(Tier.HOST, MIB)
    block = arena.alloc(4096, "a")
    view = block.view
    arena.close()
    with pytest.raises(ValueError, match="arena is closed"):
        arena.alloc(1, "b")
    reservation = weakref.ref(arena._memory)
    del arena
    block.free()
    view[:] = b"x" * 4096
    assert bytes(view) == b"x" * 4096
    del view, block
    gc.collect()
    assert reservation() is None


def test_threads_and_finalizers_at_any_moment() -> None:
    """Blocks that die in the collector, inside other calls of the arena, in several threads."""
    arena = Arena(Tier.HOST, 4 * MIB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        kept: list[tuple[Block, int]] = []
        try:
            for _ in range(1500):
                block = arena.try_alloc(generator.randrange(1, 40_000), f"thread {seed}", align=64)
                if block is not None:
                    mark = generator.randrange(256)
                    ctypes.memset(block.address, mark, block.nbytes)
                    loop: list[object] = [block]
                    loop.append(loop)  # only the collector frees it
                    if generator.random() < 0.5:
                        kept.append((block, mark))
                if len(kept) > 12:
                    block, mark = kept.pop(generator.randrange(len(kept)))
                    assert ctypes.string_at(block.address, block.nbytes) == bytes([mark]) * block.nbytes
        except BaseException as error:  # noqa: BLE001  told by the main thread
            errors.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(7)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    assert errors == []
    gc.collect()
    assert arena.used == 0
    assert arena.largest_hole == 4 * MIB


@pytest.mark.parametrize("moves", [4000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_no_fragmentation_growth(moves: int) -> None:
    """Shards of a few sizes come and go for long: the largest hole of a half-full arena does not shrink over time."""
    sizes = [96 * 4096, 130 * 4096 + 5, 8 * 4096, 4096, 17]
    budget = 2000 * 4096
    arena = Arena(Tier.HOST, budget)
    generator = random.Random(1)
    live: list[Block] = []
    worst = [budget, budget]
    for move in range(moves):
        while arena.used > budget // 2 or (live and generator.random() < 0.4):
            live.pop(generator.randrange(len(live))).free()
        live.append(arena.alloc(generator.choice(sizes), "shard"))
        half = move * 2 // moves
        worst[half] = min(worst[half], arena.largest_hole)
    assert worst[1] >= 0.5 * worst[0]
    assert worst[1] >= max(sizes)
    live.clear()
    assert arena.largest_hole == budget


class ArenaMachine(RuleBasedStateMachine):
    """An arena against a list of what is live."""

    BUDGET = 64 * 1024

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(Tier.HOST, self.BUDGET)
        self.live: dict[int, tuple[Block | None, memoryview | None, int, int, int]] = {}
        self.next = 0
        self.peak = 0

    @rule(nbytes=st.integers(1, 20_000), align=st.sampled_from([1, 64, 4096]), view=st.booleans())
    def alloc(self, nbytes: int, align: int, view: bool) -> None:
        block = self.arena.try_alloc(nbytes, f"n{self.next % 3}", align=align)
        base = self.arena._memory.address
        taken = sorted((address - base, address - base + size) for _, _, address, size, _ in self.live.values())
        edges = [0, *(edge for span in taken for edge in span), self.BUDGET]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        fits = any(start + -start % align + nbytes <= end for start, end in gaps)
        assert (block is not None) == fits
        if block is not None:
            assert block.address % align == 0
            mark = self.next % 251
            ctypes.memset(block.address, mark, nbytes)
            self.live[self.next] = (block, block.view if view else None, block.address, nbytes, mark)
            self.next += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), first=st.sampled_from(["block", "view"]))
    def let_go(self, data: st.DataObject, first: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        block, view, address, nbytes, mark = self.live.pop(key)
        if first == "block" and block is not None:
            block.free()
            block = None
        elif view is not None:
            view = None
        else:
            return
        if block is not None or view is not None:
            self.live[key] = (block, view, address, nbytes, mark)

    @invariant()
    def books(self) -> None:
        used = sum(nbytes for _, _, _, nbytes, _ in self.live.values())
        self.peak = max(self.peak, used)
        report = self.arena.report()
        assert report.used == used == self.arena.used
        assert report.peak == self.peak
        assert sum(report.by_owner.values()) == used
        for _, _, address, nbytes, mark in self.live.values():
            assert ctypes.string_at(address, nbytes) == bytes([mark]) * nbytes

    def teardown(self) -> None:
        self.live.clear()
        assert self.arena.largest_hole == self.BUDGET


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_interpreter_exit_with_live_blocks_is_quiet() -> None:
    code = (
        "from lamina.tiers.memory.arena import Arena; from lamina.tiers.tier import Tier\n"
        "a = Arena(Tier.HOST, 1 << 20); b = a.alloc(5000, 'x'); v = b.view; b.free(); a.close()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")

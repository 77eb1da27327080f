"""The store against a dict: any order of writes, commits, aborts, pins, restores and reopenings."""

import os
import shutil
import tempfile
import warnings

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_samples import State, read_all

from lamina.aio_native import AsyncIO
from lamina.tiers.errors import StoreError
from lamina.tiers.nvme.pin import PinnedGeneration
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.nvme.transaction import Transaction
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

SHARDS = (
    ShardSpec(
        name="a",
        numel=3000,
        planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.EXP_AVG, itemsize=4)),
    ),
    ShardSpec(name="b", numel=1, planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2),)),
    ShardSpec(name="c", numel=20_000, planes=(PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),)),
)
SIZES = {(s.name, p.plane): s.numel * p.itemsize for s in SHARDS for p in s.planes}
KEYS = sorted(SIZES)


class StoreMachine(RuleBasedStateMachine):
    """written: what the open transaction has written of each plane, as (start, end) by byte."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.io = AsyncIO(queue_depth=4, backend="threads", num_threads=2)
        self.generations, self.num_paths, self.verify = 2, 1, "always"
        self.committed: State | None = None
        self.step = 0
        self.transaction: Transaction | None = None
        self.fresh: dict[tuple[str, Plane], bytearray] = {}
        self.covered: dict[tuple[str, Plane], bytearray] = {}
        self.pins: list[tuple[PinnedGeneration, State, int]] = []
        self.store = self.open()

    def open(self) -> GenerationStore:
        paths = [NvmePath(path=f"{self.root}/disk{i}", weight=i + 1) for i in range(self.num_paths)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GenerationStore.open(
                paths,
                job="j",
                rank=0,
                shards=SHARDS,
                io=self.io,
                generations=self.generations,
                chunk_bytes=4096,
                verify=self.verify,  # type: ignore[arg-type]
            )

    @precondition(lambda self: self.transaction is None)
    @rule()
    def begin(self) -> None:
        self.transaction = self.store.begin()
        self.fresh = {key: bytearray(size) for key, size in SIZES.items()}
        self.covered = {key: bytearray(size) for key, size in SIZES.items()}

    @precondition(lambda self: self.transaction is not None)
    @rule(key=st.sampled_from(KEYS), data=st.data(), fill=st.integers(1, 255), wait=st.booleans())
    def write(self, key: tuple[str, Plane], data: st.DataObject, fill: int, wait: bool) -> None:
        assert self.transaction is not None
        start = data.draw(st.integers(0, SIZES[key]))
        end = data.draw(st.integers(start, SIZES[key]))
        handle = self.transaction.write(*key, bytes([fill]) * (end - start), offset=start)
        if wait:
            assert handle.wait() == end - start
        self.fresh[key][start:end] = bytes([fill]) * (end - start)
        self.covered[key][start:end] = b"\1" * (end - start)

    @precondition(lambda self: self.transaction is not None)
    @rule(fill=st.integers(1, 255))
    def write_everything(self, fill: int) -> None:
        assert self.transaction is not None
        for key, size in SIZES.items():
            self.transaction.write(*key, bytes([fill]) * size)
            self.fresh[key][:] = bytes([fill]) * size
            self.covered[key][:] = b"\1" * size

    @precondition(lambda self: self.transaction is not None)
    @rule(key=st.sampled_from(KEYS), data=st.data())
    def read_back(self, key: tuple[str, Plane], data: st.DataObject) -> None:
        assert self.transaction is not None
        start = data.draw(st.integers(0, SIZES[key]))
        buffer = bytearray(data.draw(st.integers(0, SIZES[key] - start)))
        end = start + len(buffer)
        if all(self.covered[key][start:end]):
            self.transaction.read(*key, buffer, offset=start).wait()
            assert buffer == self.fresh[key][start:end]
        else:
            with pytest.raises(StoreError, match="not all written"):
                self.transaction.read(*key, buffer, offset=start)

    @precondition(lambda self: self.transaction is not None and self.committed is not None)
    @rule()
    def copy_rest(self) -> None:
        assert self.transaction is not None
        assert self.committed is not None
        copied = self.transaction.copy_rest()
        assert copied == sum(covered.count(0) for covered in self.covered.values())
        for key, old in self.committed.items():
            for at, was in enumerate(self.covered[key]):
                if not was:
                    self.fresh[key][at] = old[at]
            self.covered[key][:] = b"\1" * SIZES[key]

    @precondition(lambda self: self.transaction is not None)
    @rule(durable=st.booleans(), background=st.booleans())
    def commit(self, durable: bool, background: bool) -> None:
        assert self.transaction is not None
        missing = [f"{shard}/{plane}" for (shard, plane) in SIZES if not all(self.covered[shard, plane])]
        assert self.transaction.missing() == missing
        if missing:
            with pytest.raises(StoreError, match="not written"):
                self.transaction.commit(self.step + 1)
            return
        self.step += 1
        self.transaction.commit(self.step, {"step": self.step}, durable=durable, background=background)
        self.committed = {key: bytes(data) for key, data in self.fresh.items()}
        self.transaction = None

    @precondition(lambda self: self.transaction is not None)
    @rule()
    def abort(self) -> None:
        assert self.transaction is not None
        self.transaction.abort()
        self.transaction = None

    @rule(generations=st.sampled_from([2, 3]), grow=st.booleans(), verify=st.sampled_from(["always", "resume"]))
    def reopen(self, generations: int, grow: bool, verify: str) -> None:
        self.store.close()
        self.verify = verify
        self.transaction = None
        self.generations = generations
        self.num_paths = min(3, self.num_paths + grow)
        self.store = self.open()

    @rule(weights=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def restripe(self, weights: list[int]) -> None:
        wanted = weights[: self.num_paths]
        if sum(wanted):
            assert self.store.restripe(wanted) <= self.generations
        else:
            with pytest.raises(ValueError, match="need at least one above 0"):
                self.store.restripe(wanted)

    @precondition(lambda self: self.committed is not None)
    @rule(wait=st.booleans())
    def flush(self, wait: bool) -> None:
        flushed = self.store.flush()
        if wait:
            flushed.wait()

    @precondition(lambda self: self.committed is not None and len(self.pins) < 3)
    @rule(background=st.booleans())
    def pin(self, background: bool) -> None:
        assert self.committed is not None
        directory = f"{self.root}/pin{self.step}-{len(self.pins)}-{os.urandom(4).hex()}"
        pinned = self.store.pin(directory, background=background)
        assert pinned.copy_bytes == 0
        self.pins.append((pinned, self.committed, self.step))

    @precondition(lambda self: self.pins and self.transaction is None)
    @rule(data=st.data(), remove=st.booleans())
    def restore(self, data: st.DataObject, remove: bool) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        pinned, state, step = self.pins[index]
        pinned.wait()
        info = self.store.restore(pinned.directory)
        assert (info.step, info.meta) == (step, {"step": step})
        self.committed, self.step = state, step
        if remove:
            pinned.remove()
            self.pins.pop(index)

    @invariant()
    def the_current_generation_is_the_last_committed(self) -> None:
        if self.committed is not None:  # first, for it may not have landed yet
            assert read_all(self.store) == self.committed
        current = self.store.current
        assert (current is None) == (self.committed is None)
        assert current is None or current.step == self.step
        names = {
            name.split(".")[0] for i in range(self.num_paths) for name in os.listdir(f"{self.root}/disk{i}/j/rank0")
        }
        assert len([name for name in names if name.startswith("gen-")]) <= self.generations

    def teardown(self) -> None:
        self.store.close(remove=True)
        left = [name for name in os.listdir(self.root) if name.startswith("disk") and os.listdir(f"{self.root}/{name}")]
        self.io.close()
        shutil.rmtree(self.root)
        assert left == []


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_store_machine_for_long() -> None:
    class Longer(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
        settings = settings(max_examples=600, stateful_step_count=50, deadline=None)

    Longer().runTest()

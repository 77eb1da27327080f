"""Long runs on the real disk: pins of any size take the same time, and wear agrees with the kernel's books."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.aio_native import AlignedBuffer, AsyncIO
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath, Plane, PlaneSpec, ShardSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Open = Callable[..., GenerationStore]
MIB = 1 << 20
PLANES = (PlaneSpec(plane=Plane.PARAM, itemsize=2), PlaneSpec(plane=Plane.EXP_AVG, itemsize=4))


def big_shards(total: int) -> tuple[ShardSpec, ...]:
    numel = 64 * MIB // 6
    return tuple(ShardSpec(name=f"block{index}", numel=numel, planes=PLANES) for index in range(total // (numel * 6)))


def fill(store: GenerationStore, buffer: AlignedBuffer, step: int) -> int:
    """Write a whole generation from one buffer; bytes of state."""
    written = 0
    with store.begin() as transaction:
        for shard in store.shards:
            for spec in shard.planes:
                nbytes = shard.plane_bytes(spec.plane)
                transaction.write(shard.name, spec.plane, buffer.view[:nbytes])
                written += nbytes
        transaction.commit(step, durable=True)
    return written


def test_a_pin_takes_the_same_time_for_any_size(tmp_path: Path, open_store: Open) -> None:
    medians: dict[int, float] = {}
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    large = 8 << 30 if free > 40 << 30 else 2 << 30
    with AlignedBuffer(64 * MIB) as buffer:
        buffer.view[:] = os.urandom(MIB) * 64
        for total in (64 * MIB, large):
            store = open_store(
                [NvmePath(path=str(tmp_path / str(total)))], shards=big_shards(total), chunk_bytes=MIB, verify="off"
            )
            fill(store, buffer, 0)
            times = []
            before = sum(wear.written for wear in store.wear())
            for index in range(9):
                start = time.perf_counter()
                pinned = store.pin(str(tmp_path / f"pin{total}-{index}"))
                times.append(time.perf_counter() - start)
                assert pinned.copy_bytes == 0
            assert sum(wear.written for wear in store.wear()) == before
            fill(store, buffer, 1)
            assert store.restore(str(tmp_path / f"pin{total}-0")).step == 0
            medians[total] = statistics.median(times)
            store.close(remove=True)
    print({f"{total >> 20} MiB": f"{median * 1000:.1f} ms" for total, median in medians.items()})
    assert medians[large] < 5 * medians[64 * MIB] + 0.02


def sectors(device: str) -> int:
    """Bytes written to a device since the start of the machine."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if f"{fields[0]}:{fields[1]}" == device:
            return int(fields[9]) * 512
    pytest.skip(f"device {device} is not in /proc/diskstats")


def test_wear_agrees_with_the_kernel(tmp_path: Path, open_store: Open) -> None:
    """Others may write meanwhile, so the best of three rounds counts."""
    store = open_store([NvmePath(path=str(tmp_path))], shards=big_shards(512 * MIB), chunk_bytes=MIB)
    off = []
    with AlignedBuffer(64 * MIB) as buffer:
        fill(store, buffer, 0)
        fill(store, buffer, 1)
        for step in range(2, 5):
            os.sync()
            (wear,) = store.wear()
            before = sectors(wear.device)
            payload = sum(fill(store, buffer, step) for _ in range(2))
            after = store.wear()[0]
            assert after.written - wear.written >= payload
            counted = after.written - wear.written
            off.append((sectors(wear.device) - before) / counted - 1)
    print(f"/proc/diskstats over our count: {[f'{100 * value:+.2f} %' for value in off]}")
    assert min(abs(value) for value in off) < 0.05


def test_a_copy_to_another_disk_is_bounded_and_training_goes_on(tmp_path: Path, open_store: Open, io: AsyncIO) -> None:
    """A streamed pin of 1 GiB into memory, while updates go on."""
    target = Path("/dev/shm") / f"lamina-{os.getpid()}"
    if not target.parent.is_dir() or os.stat(target.parent).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    store = open_store([NvmePath(path=str(tmp_path))], shards=big_shards(1 << 30), chunk_bytes=MIB)
    with AlignedBuffer(64 * MIB) as buffer:
        fill(store, buffer, 0)
        pinned = store.pin(str(target))
        try:
            steps = 0
            while not pinned.done():
                fill(store, buffer, 1 + steps)
                steps += 1
            pinned.wait()
            print(f"{pinned.copied_bytes >> 20} MiB copied during {steps} update(s)")
            assert pinned.copied_bytes >= 900 * MIB
            assert store.restore(str(target)).step == 0
        finally:
            pinned.remove()
    assert not target.exists()

"""AlignedBuffer: where it lies, what it is made of, and that nothing is left hanging."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from lamina.aio_native import AlignedBuffer
from lamina.aio_native.buffers import HUGE_PAGE, resident_bytes


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 3])
def test_it_begins_on_a_huge_page_and_is_zeroed(nbytes: int) -> None:
    with AlignedBuffer(nbytes) as buffer:
        assert buffer.address % HUGE_PAGE == 0
        assert (len(buffer.view), buffer.view.format, buffer.view.readonly) == (nbytes, "B", False)
        assert np.frombuffer(buffer.view, np.uint8).ctypes.data == buffer.address
        assert bytes(buffer.view) == bytes(nbytes)
        buffer.view[-1] = 255


def test_page_kind_is_the_kernels_answer() -> None:
    with AlignedBuffer(8 * HUGE_PAGE, huge_pages=False) as buffer:
        buffer.view[::4096] = bytes(8 * HUGE_PAGE // 4096)
        assert buffer.page_kind == "small"
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
        offered = "[never]" not in file.read()
    with AlignedBuffer(8 * HUGE_PAGE) as buffer:
        buffer.view[::4096] = bytes(8 * HUGE_PAGE // 4096)
        resident, huge = resident_bytes(buffer.address, buffer.nbytes)
        if buffer.page_kind != "hugetlb":
            assert (buffer.page_kind == "thp") == (2 * huge > resident)
            assert offered or buffer.page_kind == "small"


def test_it_takes_no_more_memory_than_asked() -> None:
    # B-01: the reservation in front of the boundary is address space only.
    for nbytes in (int(1.1 * (1 << 24)), int(1.1 * (1 << 25)), 3 * HUGE_PAGE + 4096):
        with AlignedBuffer(nbytes) as buffer:
            buffer.view[::4096] = bytes(-(-nbytes // 4096))
            if buffer.page_kind != "hugetlb":
                assert nbytes <= resident_bytes(buffer.address, nbytes)[0] <= nbytes + HUGE_PAGE


def test_arrays_outlive_the_buffer() -> None:
    buffer = AlignedBuffer(HUGE_PAGE)
    array = np.frombuffer(buffer.view, np.int32)
    array[:] = 7
    buffer.close()
    buffer.close()
    del buffer
    gc.collect()
    assert int(array.sum()) == 7 * (HUGE_PAGE // 4)


def test_memory_goes_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(20):
        with AlignedBuffer(32 * HUGE_PAGE) as buffer:
            buffer.view[::4096] = bytes(32 * HUGE_PAGE // 4096)
    assert resident() - before < 16 * HUGE_PAGE


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        AlignedBuffer(0)
    with pytest.raises((OSError, MemoryError, OverflowError)):
        AlignedBuffer(1 << 60)


@pytest.mark.root
@pytest.mark.slow  # changes a setting of the whole machine for a moment
def test_hugetlb_pages_are_taken_when_there_are_some() -> None:
    path = "/proc/sys/vm/nr_hugepages"
    if not os.access(path, os.W_OK):
        pytest.skip("reserving huge pages needs root")
    with open(path, encoding="ascii") as file:
        before = file.read()
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(int(before) + 8))
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) for line in file if line.startswith("HugePages_Free"))
        if free < 3:
            pytest.skip("the kernel found no contiguous memory for huge pages")
        code = (
            "from lamina.aio_native import AlignedBuffer\n"
            "b = AlignedBuffer(5 << 20); b.view[-1] = 1; print(b.page_kind, b.address % (2 << 20))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["hugetlb", "0"]
    finally:
        with open(path, "w", encoding="ascii") as file:
            file.write(before)

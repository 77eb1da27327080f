"""Checksums taken in the pass that writes: equal to those of a second pass, and used on the way to NVMe."""

import random
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import adam_planes, random_planes

from lamina.aio_native import crc32c, crc32c_join
from lamina.tiers import TakenSums
from lamina.tiers.nvme.taken_sums import checksum
from lamina.zero.adam.kernels import SUM_PIECE, AdamHyper, AdamPlanes, DType, Kernels, available_paths, num_sums

HYPER = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)


def with_sums(planes: AdamPlanes, address: int) -> AdamPlanes:
    fields = {name: getattr(planes, name) for name in AdamPlanes.__dataclass_fields__}
    return AdamPlanes(**{**fields, "sums": address})


@pytest.mark.parametrize("path", available_paths())
@pytest.mark.parametrize("kind", ["fp32", "split", "bf16", "fp16"])
@pytest.mark.parametrize("numel", [1, 100, SUM_PIECE, SUM_PIECE + 1, 3 * SUM_PIECE + 77])
def test_sums_of_the_kernel_are_those_of_a_second_pass(path, kind, numel):
    ours = random_planes(kind, DType.BF16, numel, seed=1)
    plain = ours.copy()
    third = ours.remainder if ours.master is None else ours.master
    written = [t for t in (ours.param, ours.exp_avg, ours.exp_avg_sq, third) if t is not None]
    count = num_sums(numel)
    sums = array("I", [7] * (count * len(written) + 1))
    with Kernels(2, path=path) as kernels:
        kernels.adam(with_sums(adam_planes(ours), sums.buffer_info()[0]), HYPER)
        kernels.adam(adam_planes(plain), HYPER)
    assert sums[-1] == 7  # a guard
    for index, tensor in enumerate(written):
        raw = memoryview(tensor.contiguous().view(dtype=torch.uint8).numpy())
        size = SUM_PIECE * tensor.element_size()
        wanted = [crc32c(raw[at : at + size]) for at in range(0, len(raw), size)]
        assert list(sums[index * count : (index + 1) * count]) == wanted
    assert all((a == b).all() for a, b in zip(ours.written(), plain.written(), strict=True))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), max_size=6),
    piece=st.integers(1, 40),
    start=st.integers(0, 200),
    length=st.integers(0, 200),
)
def test_a_checksum_of_taken_pieces_is_that_of_the_bytes(sizes, piece, start, length):
    """Ranges of any size one after the other, every second one without taken sums, and a window anywhere."""
    data = memoryview(random.Random(1).randbytes(sum(sizes) + 20))
    taken, at = [], 0
    for index, size in enumerate(sizes):
        if index % 2 == 0:
            crcs = array("I", [crc32c(data[b : min(b + piece, at + size)]) for b in range(at, at + size, piece)])
            taken.append(TakenSums(at, size, piece, memoryview(crcs)))
        at += size
    start = min(start, len(data))
    end = min(len(data), start + length)
    crc, num_read = checksum(data, start, end, taken)
    assert crc == crc32c(data[start:end])
    whole = sum(
        min(b + piece, t.offset + t.nbytes) - b
        for t in taken
        for b in range(t.offset, t.offset + t.nbytes, piece)
        if start <= b and min(b + piece, t.offset + t.nbytes) <= end
    )
    assert num_read == end - start - whole


def test_joining_needs_only_lengths_and_checksums():
    data = random.Random(2).randbytes(1000)
    crcs = array("I", [crc32c(data[at : at + 300]) for at in range(100, 1000, 300)])
    assert crc32c_join(crc32c(data[:100]), crcs, 300, 300) == crc32c(data)
    assert crc32c_join(5, array("I"), 300, 0) == 5
    with pytest.raises(ValueError, match="4 uint32"):
        TakenSums(0, 1000, 300, memoryview(crcs))

"""The companions of the Adam kernel against plain torch and numpy: norm, finiteness, accumulation, conversion."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import TORCH, bits, guards_intact, placed

from lamina.zero.adam.kernels import NORM_BLOCK, DType, Kernels, available_paths, num_norm_blocks

DTYPES = list(DType)


@pytest.fixture(scope="module", params=available_paths())
def kernels(request: pytest.FixtureRequest):
    with Kernels(2, path=request.param) as made:
        yield made


def values(dtype: DType, numel: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 4, (numel,), generator=random)
    return (torch.randn(numel, generator=random) * scale).to(TORCH[dtype])


def every_half(dtype: DType) -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(TORCH[dtype])


def partials(kernels: Kernels, x: torch.Tensor, dtype: DType) -> numpy.ndarray:
    found = kernels.squared_norm(x.numel(), src=x.data_ptr(), dtype=dtype)
    assert len(found) == num_norm_blocks(x.numel())
    return numpy.array(found)


def reference_partials(x: torch.Tensor) -> numpy.ndarray:
    """Element i of a block in sum i mod 32, the sums folded in halves: the stated order, in numpy."""
    found = []
    for begin in range(0, x.numel(), NORM_BLOCK):
        block = x[begin : begin + NORM_BLOCK].double().numpy()
        padded = numpy.zeros(-(-block.size // 32) * 32)
        padded[: block.size] = block
        lanes = numpy.zeros(32)
        for row in padded.reshape(-1, 32):
            lanes += row * row
        for half in (16, 8, 4, 2, 1):
            lanes[:half] += lanes[half : 2 * half]
        found.append(lanes[0])
    return numpy.array(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 4095, 4096, 4097, 200_003])
def test_squared_norm_has_one_order_of_addition(kernels, dtype, numel):
    x = values(dtype, numel)
    wanted = reference_partials(x)
    assert numpy.array_equal(partials(kernels, x, dtype), wanted)
    total = math.fsum(kernels.squared_norm(numel, src=x.data_ptr(), dtype=dtype))
    exact = math.fsum(float(v) ** 2 for v in x.double().tolist())
    assert total == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_squared_norm_does_not_depend_on_threads_or_cuts(threads):
    x = values(DType.BF16, 50 * NORM_BLOCK + 17)
    wanted = reference_partials(x)
    cut = 13 * NORM_BLOCK
    with Kernels(threads) as kernels:
        assert numpy.array_equal(partials(kernels, x, DType.BF16), wanted)
        pieces = [partials(kernels, x[:cut], DType.BF16), partials(kernels, x[cut:], DType.BF16)]
    assert numpy.array_equal(numpy.concatenate(pieces), wanted)


def test_squared_norm_of_huge_and_nonfinite_values(kernels):
    x = torch.full((40,), 3e38)
    assert partials(kernels, x, DType.FP32).tolist() == [pytest.approx(40 * 9e76, rel=1e-6)]
    x[33] = float("inf")
    assert partials(kernels, x, DType.FP32).tolist() == [math.inf]
    x[5] = float("nan")
    assert numpy.isnan(partials(kernels, x, DType.FP32)).all()


@settings(max_examples=80, deadline=None)
@given(
    numel=st.integers(0, 300),
    offset=st.integers(0, 20),
    at=st.integers(0, 299),
    bad=st.sampled_from([float("inf"), -float("inf"), float("nan")]),
    dtype=st.sampled_from(DTYPES),
)
def test_nonfinite_is_found_wherever_it_is(kernels, numel, offset, at, bad, dtype):
    x = torch.full((numel + offset + 8,), float("nan")).to(TORCH[dtype])  # around it: not to be looked at
    x = x[offset : offset + numel]
    x.copy_(values(dtype, numel))
    assert not kernels.has_nonfinite(numel, src=x.data_ptr(), dtype=dtype)
    if at < numel:
        x[at] = bad
        assert kernels.has_nonfinite(numel, src=x.data_ptr(), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_and_smallest_values_are_finite(kernels, dtype):
    info = torch.finfo(TORCH[dtype])
    smallest = torch.tensor([1], dtype=torch.int16 if dtype.itemsize == 2 else torch.int32).view(TORCH[dtype])
    x = torch.cat([torch.tensor([info.max, info.min, info.tiny, -0.0], dtype=TORCH[dtype]), smallest])
    assert not kernels.has_nonfinite(x.numel(), src=x.data_ptr(), dtype=dtype)
    big = torch.zeros(300_000, dtype=TORCH[dtype])
    assert not kernels.has_nonfinite(big.numel(), src=big.data_ptr(), dtype=dtype)
    big[299_999] = float("nan")
    assert kernels.has_nonfinite(big.numel(), src=big.data_ptr(), dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(0, 200),
    offset=st.integers(0, 20),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, -2.0]),
    add=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_accumulate_is_a_rounded_product_and_a_rounded_sum(kernels, numel, offset, scale, add, dtype):
    src = placed(values(dtype, numel, 1), offset)
    before = values(DType.FP32, numel, 2)
    dst = placed(before, offset)
    kernels.accumulate(numel, dst=dst.data_ptr(), src=src.data_ptr(), src_dtype=dtype, scale=scale, add=add)
    product = src.float().numpy() * numpy.float32(scale)
    wanted = before.numpy() + product if add else product
    assert numpy.array_equal(dst.numpy(), wanted)
    assert guards_intact(dst, offset)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_every_16_bit_value_widens_exactly(kernels, dtype):
    x = every_half(dtype)
    out = torch.empty(x.numel())
    kernels.convert(x.numel(), src=x.data_ptr(), src_dtype=dtype, dst=out.data_ptr(), dst_dtype=DType.FP32)
    wanted = x.float()
    nan = wanted.isnan()
    assert torch.equal(bits(out)[~nan], bits(wanted)[~nan])
    assert torch.equal(out.isnan(), nan)


@pytest.mark.parametrize("dst", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("src", DTYPES)
def test_narrowing_rounds_to_nearest_even(kernels, src, dst):
    if src is DType.FP32:
        # Each 16-bit value, its upper neighbours and the points half-way between, from below and above.
        base = torch.cat([every_half(DType.BF16).float(), every_half(DType.FP16).float()])
        whole = bits(base).to(torch.int64)
        steps = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x1FFF]
        x = torch.cat([(whole + s).to(torch.int32) for s in steps]).view(torch.float32)
    else:
        x = every_half(src)
    out = torch.empty(x.numel(), dtype=TORCH[dst])
    kernels.convert(x.numel(), src=x.data_ptr(), src_dtype=src, dst=out.data_ptr(), dst_dtype=dst)
    wanted = x.float().to(TORCH[dst])
    nan = x.isnan()
    assert torch.equal(bits(out)[~nan], bits(wanted)[~nan])
    assert torch.equal(out.isnan(), nan)


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(0, 100), offset=st.integers(0, 20), src=st.sampled_from(DTYPES), dst=st.sampled_from(DTYPES))
def test_convert_stays_inside_its_plane(kernels, numel, offset, src, dst):
    x = placed(values(src, numel), offset)
    out = placed(torch.zeros(numel, dtype=TORCH[dst]), offset)
    kernels.convert(numel, src=x.data_ptr(), src_dtype=src, dst=out.data_ptr(), dst_dtype=dst)
    assert torch.equal(bits(out), bits(x.to(TORCH[dst])))
    assert guards_intact(out, offset)


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(0, 100), offset=st.integers(0, 20))
def test_split_and_merge_stay_inside_their_planes(kernels, numel, offset):
    master = placed(values(DType.FP32, numel), offset)
    param = placed(torch.zeros(numel, dtype=torch.bfloat16), offset)
    remainder = placed(torch.zeros(numel, dtype=torch.int16), offset)
    again = placed(torch.zeros(numel), offset)
    planes = {"param": param.data_ptr(), "remainder": remainder.data_ptr()}
    kernels.split_bf16(numel, master=master.data_ptr(), **planes)
    kernels.merge_bf16(numel, master=again.data_ptr(), **planes)
    assert torch.equal(bits(again), bits(master))
    assert all(guards_intact(t, offset) for t in (param, remainder, again))


@pytest.mark.parametrize("non_temporal", [False, True])
def test_stream_copies_three_planes(kernels, non_temporal):
    rooms = [torch.zeros(100_000 + 32) for _ in range(6)]

    def aligned(room: torch.Tensor) -> torch.Tensor:
        return room[(-room.data_ptr() % 64) // 4 :][:100_000]

    source, target = [aligned(r) for r in rooms[:3]], [aligned(r) for r in rooms[3:]]
    for i, plane in enumerate(source):
        plane.copy_(values(DType.FP32, 100_000, i))
    kernels.stream(
        100_000,
        source=[t.data_ptr() for t in source],
        target=[t.data_ptr() for t in target],
        non_temporal=non_temporal,
    )
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))

"""Every dispatch path, thread count, cut and alignment gives the same bits, near a float64 reference."""

import itertools

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import Planes, bits, guards_intact, random_planes, run_adam

from lamina.zero.adam.kernels import AdamHyper, DType, Kernels, available_paths

PATHS = available_paths()
KINDS = ["fp32", "split", "bf16", "fp16"]
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
VARIANTS = [
    HYPER,
    AdamHyper(lr=1e-2, beta1=0.3, beta2=0.95, eps=1e-6, weight_decay=0.1, step=1, adamw_mode=False),
    AdamHyper(lr=1e-2, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=5, maximize=True),
    AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, step=9, adamw_mode=False, maximize=True),
    AdamHyper(lr=1e-2, step=2, bias_correction=False),
]
LARGEST = 3.4028235e38
INF = float("inf")
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, LARGEST, -LARGEST, INF, -INF, float("nan")]


@pytest.fixture(scope="module", params=PATHS)
def kernels(request: pytest.FixtureRequest):
    with Kernels(2, path=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    with Kernels(1, path="portable") as made:
        yield made


def same(a: Planes, b: Planes) -> bool:
    """Equal bits; any NaN equals any NaN, since IEEE 754 leaves the payload open."""
    return all(
        torch.equal(torch.where(x.isnan(), 0, bits(x)), torch.where(y.isnan(), 0, bits(y)))
        for x, y in zip(a.written(), b.written(), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad_dtype", list(DType))
def test_paths_agree_on_every_variant(kernels, plain, kind, grad_dtype):
    for hyper, multiplier, adopt in itertools.product(VARIANTS, [1.0, 0.37], [False, True]):
        ours = random_planes(kind, grad_dtype, 1003, seed=hyper.step)
        reference = ours.copy()
        for _ in range(2):
            run_adam(kernels, ours, hyper, multiplier, adopt)
            run_adam(plain, reference, hyper, multiplier, adopt)
        assert same(ours, reference), (hyper, multiplier, adopt)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_agree_on_special_values(kernels, plain, kind):
    values = torch.tensor(SPECIAL)
    grid = torch.cartesian_prod(values, values, values, values.abs()).T.contiguous()
    ours = random_planes(kind, DType.FP32, grid.shape[1], seed=1)
    ours.grad, ours.exp_avg, ours.exp_avg_sq = grid[1].clone(), grid[2].clone(), grid[3].clone()
    ours.param = grid[0].to(ours.param.dtype)
    if ours.master is not None:
        ours.master = grid[0].clone()
    reference = ours.copy()
    for hyper in VARIANTS:
        run_adam(kernels, ours, hyper)
        run_adam(plain, reference, hyper)
        assert same(ours, reference), hyper


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_threads_change_nothing(threads, kind, plain):
    ours = random_planes(kind, DType.BF16, 150_001, seed=2)
    reference = ours.copy()
    with Kernels(threads) as kernels:
        run_adam(kernels, ours, HYPER)
    run_adam(plain, reference, HYPER)
    assert same(ours, reference)


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(0, 300),
    offset=st.integers(0, 40),
    cut=st.integers(0, 300),
    kind=st.sampled_from(KINDS),
    grad_dtype=st.sampled_from(list(DType)),
    seed=st.integers(0, 1000),
)
def test_an_element_does_not_depend_on_its_place(kernels, numel, offset, cut, kind, grad_dtype, seed):
    whole = random_planes(kind, grad_dtype, numel, seed)
    cut = min(cut, numel)
    left, right = whole.copy(0, cut, offset), whole.copy(cut, None, offset // 2)
    run_adam(kernels, whole, HYPER, 0.5)
    run_adam(kernels, left, HYPER, 0.5)
    run_adam(kernels, right, HYPER, 0.5)
    for one, two, all_of_it in zip(left.written(), right.written(), whole.written(), strict=True):
        assert torch.equal(bits(torch.cat([one, two])), bits(all_of_it))
    assert all(guards_intact(t, offset) for t in [*left.written(), left.grad])
    assert all(guards_intact(t, offset // 2) for t in [*right.written(), right.grad])


def test_one_element_at_every_position_of_a_vector(kernels):
    whole = random_planes("split", DType.FP32, 67, seed=5)
    singles = [whole.copy(i, i + 1) for i in range(67)]
    run_adam(kernels, whole, HYPER)
    for i, single in enumerate(singles):
        run_adam(kernels, single, HYPER)
        assert torch.equal(bits(single.param)[0], bits(whole.param)[i])
        assert torch.equal(bits(single.exp_avg_sq)[0], bits(whole.exp_avg_sq)[i])


def test_roots_and_quotients_are_correctly_rounded_for_every_mantissa(kernels):
    """With beta2 = 1 - 1e-9, which is 1 in fp32, and no gradient, v stays what the test put there."""
    if kernels.path == "portable":
        pytest.skip("the portable path uses the machine's own root and division")
    mantissas = numpy.arange(0x3F800000, 0x40800000, dtype=numpy.int32)  # [1, 4)
    for power, step in [(0, 1), (-100, 7), (60, 1)]:
        v = numpy.ldexp(mantissas.view(numpy.float32), power).astype(numpy.float32)
        planes = Planes(
            param=torch.zeros(v.size),
            grad=torch.zeros(v.size),
            exp_avg=torch.ones(v.size),
            exp_avg_sq=torch.from_numpy(v.copy()),
        )
        hyper = AdamHyper(lr=1.0, beta1=1 - 1e-9, beta2=1 - 1e-9, eps=0.0, step=step)
        run_adam(kernels, planes, hyper)
        correction = numpy.float32(numpy.sqrt(1.0 - hyper.beta2**step))
        neg_step = numpy.float32(-(1.0 / (1.0 - hyper.beta1**step)))
        wanted = (neg_step * planes.exp_avg.numpy()) / (numpy.sqrt(v) / correction)
        assert numpy.array_equal(planes.exp_avg_sq.numpy(), v)
        assert numpy.array_equal(planes.param.numpy(), wanted)


@pytest.mark.parametrize("hyper", VARIANTS)
def test_one_step_is_near_a_float64_reference(kernels, hyper):
    planes = random_planes("fp32", DType.FP32, 20_000, seed=11)
    random = torch.Generator().manual_seed(12)
    planes.exp_avg.zero_()
    planes.exp_avg_sq.zero_()
    for _ in range(4):  # moments as training makes them
        planes.grad = planes.grad * (1 + torch.rand(20_000, generator=random))
        run_adam(kernels, planes, hyper)
    p, g, m, v = (t.double().numpy() for t in (planes.param, planes.grad, planes.exp_avg, planes.exp_avg_sq))
    run_adam(kernels, planes, hyper)

    def scalar(x: float) -> float:
        """The step's scalars are fp32: an input of the step, not an error of it."""
        return float(numpy.float32(x))

    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    root2 = scalar(numpy.sqrt(correction2))
    g = -g if hyper.maximize else g
    if hyper.adamw_mode:
        p = p * scalar(1 - hyper.lr * hyper.weight_decay)
    else:
        g = g + scalar(hyper.weight_decay) * p
    new_m = m + scalar(1 - hyper.beta1) * (g - m)
    new_v = scalar(hyper.beta2) * v + scalar(1 - hyper.beta2) * g * g

    def off(got: torch.Tensor, wanted: numpy.ndarray, *terms: numpy.ndarray) -> numpy.ndarray:
        """Errors in units in the last place of the largest term, as cancellation is no fault of the kernel."""
        largest = numpy.max([numpy.abs(t) for t in (wanted, *terms)], axis=0)
        unit = numpy.spacing(numpy.maximum(largest, 1e-37).astype(numpy.float32)).astype(numpy.float64)
        return numpy.abs(got.double().numpy() - wanted) / unit

    assert off(planes.exp_avg, new_m, m, g).max() <= 2
    # With L2 the gradient itself is a rounded sum, and v holds it twice: the order is torch's.
    assert off(planes.exp_avg_sq, new_v).max() <= (2 if hyper.adamw_mode else 4)
    # From the moments as stored, so that their rounding is not counted twice.
    m32, v32 = planes.exp_avg.double().numpy(), planes.exp_avg_sq.double().numpy()
    change = scalar(hyper.lr / correction1) * m32 / (numpy.sqrt(v32) / root2 + scalar(hyper.eps))
    errors = off(planes.param, p - change, p, change)
    assert errors[numpy.abs(change) < numpy.abs(p) / 4].max() <= 2
    assert errors.max() <= 4  # the change itself has five roundings


def test_gradient_multiplier_is_applied_to_the_gradient_first(kernels):
    ours = random_planes("fp32", DType.BF16, 333, seed=3)
    scaled = ours.copy()
    scaled.grad = ours.grad.float() * 0.3
    run_adam(kernels, ours, HYPER, 0.3)
    run_adam(kernels, scaled, HYPER)
    assert same(ours, scaled)


def test_the_gradient_is_left_alone(kernels):
    planes = random_planes("split", DType.FP16, 1000, seed=4)
    before = bits(planes.grad).clone()
    run_adam(kernels, planes, HYPER, 0.5)
    assert torch.equal(bits(planes.grad), before)

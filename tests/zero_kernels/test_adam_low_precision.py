"""bf16 and fp16 parameters take exactly the steps of an fp32 master, and are that master rounded."""

import pytest
import torch
from planes import Planes, bits, merge, random_planes, run_adam, split

from lamina.zero.adam.kernels import AdamHyper, DType, Kernels, available_paths

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module", params=available_paths())
def kernels(request: pytest.FixtureRequest):
    with Kernels(2, path=request.param) as made:
        yield made


def edge_masters() -> torch.Tensor:
    """Every sign and exponent, with mantissas at and around each rounding decision of the upper half."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    middle = torch.tensor([0, 1, 2, 0x3F, 0x7E, 0x7F])
    exponents = torch.arange(512)
    parts = torch.cartesian_prod(exponents, middle, low)
    whole = parts[:, 0] << 23 | parts[:, 1] << 16 | parts[:, 2]
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32).view(torch.float32)


def test_split_is_lossless_over_every_exponent(kernels):
    master = edge_masters()
    n = master.numel()
    param, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    kernels.split_bf16(n, master=master.data_ptr(), param=param.data_ptr(), remainder=remainder.data_ptr())
    wanted_param, wanted_remainder = split(master)
    assert torch.equal(bits(param), bits(wanted_param))
    assert torch.equal(remainder, wanted_remainder)
    rebuilt = torch.empty(n)
    kernels.merge_bf16(n, master=rebuilt.data_ptr(), param=param.data_ptr(), remainder=remainder.data_ptr())
    nan = master.isnan()
    assert torch.equal(bits(rebuilt)[~nan], bits(master)[~nan])
    assert torch.equal(rebuilt.isnan(), nan)
    assert torch.equal(param.isnan(), nan)


def test_split_parameter_is_the_master_rounded_to_nearest(kernels):
    master = edge_masters()
    n = master.numel()
    param, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    kernels.split_bf16(n, master=master.data_ptr(), param=param.data_ptr(), remainder=remainder.data_ptr())
    even = master.bfloat16()
    half_way = (bits(master) & 0xFFFF) == 0x8000
    usual = ~half_way & ~master.isnan()
    assert torch.equal(bits(param)[usual], bits(even)[usual])
    # Half-way cases go away from zero: the even choice is the same or one unit nearer to zero.
    ties = half_way & ~master.isnan()
    distance = bits(param)[ties].int() - bits(even)[ties].int()
    assert set(distance.tolist()) == {0, 1}
    assert torch.equal(distance == 1, ((bits(master)[ties] >> 16) & 1) == 0)


def test_split_adam_is_fp32_adam_bit_for_bit(kernels):
    """Against torch's fused AdamW on an fp32 master, 200 steps."""
    n = 4096
    random = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=random) * 10.0 ** torch.randint(-30, 30, (n,), generator=random)
    start = start.bfloat16()
    reference = start.float().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=True)
    planes = Planes(
        param=start.clone(),
        grad=start.clone(),
        exp_avg=torch.zeros(n),
        exp_avg_sq=torch.zeros(n),
        remainder=torch.zeros(n, dtype=torch.int16),
    )
    for step in range(1, 201):
        scale = 10.0 ** torch.randint(-12, 8, (n,), generator=random)
        planes.grad = (torch.randn(n, generator=random) * scale).bfloat16()
        reference.grad = planes.grad.float()
        optimizer.step()
        run_adam(kernels, planes, AdamHyper(**HYPER, step=step))
        master = merge(planes.param, planes.remainder)
        assert torch.equal(bits(master), bits(reference.detach())), step
        assert torch.equal(planes.exp_avg, optimizer.state[reference]["exp_avg"])
        assert torch.equal(planes.exp_avg_sq, optimizer.state[reference]["exp_avg_sq"])
        rounded = reference.detach().bfloat16()
        tie = (bits(master) & 0xFFFF) == 0x8000
        assert torch.equal(planes.param[~tie], rounded[~tie]), step


@pytest.mark.parametrize("kind", ["split", "bf16", "fp16"])
def test_a_master_of_any_value_takes_the_fp32_step(kernels, kind):
    """Masters over every exponent, subnormals, infinities and NaN: same as the fp32 kernel, then rounded."""
    master = edge_masters()
    n = master.numel()
    low = random_planes(kind, DType.FP32, n, seed=9)
    whole = Planes(
        param=master.clone(),
        grad=low.grad.clone(),
        exp_avg=low.exp_avg.clone(),
        exp_avg_sq=low.exp_avg_sq.clone(),
    )
    if kind == "split":
        low.param, low.remainder = split(master)
    else:
        low.param = master.to(low.param.dtype)
        low.master = master.clone()
    hyper = AdamHyper(**{**HYPER, "lr": 1e-30}, step=1)
    run_adam(kernels, low, hyper)
    run_adam(kernels, whole, hyper)
    rebuilt = merge(low.param, low.remainder) if kind == "split" else low.master
    nan = whole.param.isnan()
    assert torch.equal(bits(rebuilt)[~nan], bits(whole.param)[~nan])
    assert torch.equal(rebuilt.isnan(), nan)
    if kind == "split":
        assert torch.equal(bits(low.param)[~nan], bits(split(whole.param)[0])[~nan])
    else:
        assert torch.equal(bits(low.param)[~nan], bits(whole.param.to(low.param.dtype))[~nan])
    assert torch.equal(low.param.isnan(), nan)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_an_edited_parameter_becomes_the_master_where_it_was_edited(kernels, kind):
    planes = random_planes(kind, DType.FP32, 1000, seed=6)
    edited = torch.arange(1000) % 3 == 0
    planes.param[edited] = 123.0
    wanted = planes.copy()
    wanted.master[edited] = 123.0
    hyper = AdamHyper(**HYPER, step=1)
    run_adam(kernels, planes, hyper, adopt_param=True)
    run_adam(kernels, wanted, hyper)
    assert torch.equal(bits(planes.master), bits(wanted.master))
    assert torch.equal(bits(planes.param), bits(wanted.param))

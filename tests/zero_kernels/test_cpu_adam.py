"""CPUAdam as a drop-in torch optimizer: the numbers of torch's fused one, and the manners of an optimizer."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from planes import bits, merge

from lamina.zero.adam.cpu_adam import CPUAdam
from lamina.zero.adam.kernels import Kernels

GRID = [
    {"weight_decay": wd, "eps": eps, "betas": betas, "maximize": maximize}
    for wd in (0.0, 0.1)
    for eps in (1e-8, 1e-6, 1e-3)
    for betas in ((0.9, 0.95), (0.0, 0.999))
    for maximize in (False, True)
]


@pytest.fixture(scope="module")
def kernels():
    with Kernels(2) as made:
        yield made


def parameters(shapes: Sequence[tuple[int, ...]], dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=random).to(dtype).requires_grad_() for s in shapes]


def twins(shapes, dtype=torch.float32, seed=0):
    return parameters(shapes, dtype, seed), parameters(shapes, dtype, seed)


def give_gradients(step: int, *lists: Sequence[torch.Tensor]) -> None:
    for index, group in enumerate(zip(*lists, strict=True)):
        random = torch.Generator().manual_seed(1000 * step + index)
        grad = torch.randn(group[0].shape, generator=random)
        for p in group:
            p.grad = grad.to(p.dtype)


def torch_adam(params, *, adamw=True, **options):
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    return kind(params, fused=True, **{"weight_decay": 0.0, **options})  # AdamW's own default is 0.01


def assert_same_state(ours: CPUAdam, theirs: torch.optim.Optimizer, mine, other) -> None:
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p.detach(), q.detach())
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][key], theirs.state[q][key]), key


@pytest.mark.parametrize("adamw", [True, False])
def test_option_grid_equals_fused_torch_on_whole_vectors(kernels, adamw):
    for options in GRID:
        mine, other = twins([(64, 16), (32,), (8, 4, 5)])
        ours = CPUAdam(mine, lr=1e-2, adamw_mode=adamw, kernels=kernels, **options)
        theirs = torch_adam(other, adamw=adamw, lr=1e-2, **options)
        for step in range(20):
            give_gradients(step, mine, other)
            ours.step()
            theirs.step()
        assert_same_state(ours, theirs, mine, other)


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 17, 100, 999, 1000, 1_000_003])
@pytest.mark.parametrize("adamw", [True, False])
def test_any_length_matches_torch_within_rounding(kernels, numel, adamw):
    """C-03: decay 0 and 0.1, three eps, two betas, 100 steps (fewer where it is long)."""
    long = numel > 1000
    for options in GRID[:: 11 if long else 2]:
        mine, other = twins([(numel,)])
        ours = CPUAdam(mine, lr=1e-3, adamw_mode=adamw, kernels=kernels, **options)
        theirs = torch_adam(other, adamw=adamw, lr=1e-3, **options)
        for step in range(3 if long else 100):
            give_gradients(step, mine, other)
            ours.step()
            theirs.step()
        torch.testing.assert_close(mine[0], other[0], rtol=1e-6, atol=1e-6)
        whole = numel // 16 * 16
        assert torch.equal(mine[0][:whole], other[0][:whole])


@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("numel", [48, 1000])
def test_bf16_equals_an_fp32_master_and_is_it_rounded(kernels, adamw, numel):
    mine = parameters([(numel,)], torch.bfloat16)
    other = [p.detach().float().requires_grad_() for p in mine]
    ours = CPUAdam(mine, lr=1e-2, weight_decay=0.1, adamw_mode=adamw, kernels=kernels)
    theirs = torch_adam(other, adamw=adamw, lr=1e-2, weight_decay=0.1)
    whole = numel // 16 * 16
    for step in range(100):
        give_gradients(step, mine)
        other[0].grad = mine[0].grad.float()
        ours.step()
        theirs.step()
        master = merge(mine[0].detach(), ours.state[mine[0]]["remainder"])
        assert torch.equal(master[:whole], other[0].detach()[:whole])
        torch.testing.assert_close(master, other[0].detach(), rtol=1e-6, atol=1e-6)
        tie = (bits(master) & 0xFFFF) == 0x8000
        assert torch.equal(mine[0].detach()[~tie], master.bfloat16()[~tie])


def test_fp16_equals_an_fp32_master_and_is_it_rounded(kernels):
    mine = parameters([(160,)], torch.float16)
    other = [p.detach().float().requires_grad_() for p in mine]
    ours = CPUAdam(mine, lr=1e-2, weight_decay=0.1, kernels=kernels)
    theirs = torch_adam(other, lr=1e-2, weight_decay=0.1)
    for step in range(50):
        give_gradients(step, mine)
        other[0].grad = mine[0].grad.float()
        ours.step()
        theirs.step()
    master = ours.state[mine[0]]["master"]
    assert torch.equal(master, other[0].detach())
    assert torch.equal(mine[0].detach(), master.half())


def test_an_edit_of_an_fp16_parameter_is_kept(kernels):
    (p,) = parameters([(64,)], torch.float16)
    ours = CPUAdam([p], lr=0.0, kernels=kernels)
    give_gradients(0, [p])
    ours.step()
    p.data[3:5] = 2.0
    ours.step()
    assert p[3:5].tolist() == [2.0, 2.0]
    assert ours.state[p]["master"][3:5].tolist() == [2.0, 2.0]


def test_groups_keep_their_options_and_changes_between_steps(kernels):
    """C-17: three groups with their own rate and decay, changed by hand on the way."""
    mine, other = twins([(32,), (16, 2), (64,)])

    def groups(params):
        rates, decays = (1e-2, 1e-3, 0.0), (0.1, 0.0, 0.1)
        return [{"params": [p], "lr": lr, "weight_decay": wd} for p, lr, wd in zip(params, rates, decays, strict=True)]

    ours, theirs = CPUAdam(groups(mine), kernels=kernels), torch_adam(groups(other))
    still = mine[2].detach().clone()
    for step in range(12):
        if step == 5:
            for optimizer in (ours, theirs):
                optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.9), weight_decay=0.0)
                optimizer.param_groups[1].update(eps=1e-2, maximize=True)
        give_gradients(step, mine, other)
        ours.step()
        theirs.step()
    assert_same_state(ours, theirs, mine, other)
    assert torch.equal(mine[2].detach(), still)  # rate 0, and so no decay either


SCHEDULERS: list[Callable] = [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 0.5**t]),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 1e-3], total_steps=12),
    torch.optim.lr_scheduler.LinearLR,
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_of_torch_drive_it(kernels, make, as_tensor):
    mine, other = twins([(32,), (48,)])

    def groups(params):
        rates = (torch.tensor(1e-2), torch.tensor(1e-3)) if as_tensor else (1e-2, 1e-3)
        return [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)]

    ours, theirs = CPUAdam(groups(mine), kernels=kernels), torch_adam(groups(other))
    plans = make(ours), make(theirs)
    for step in range(10):
        give_gradients(step, mine, other)
        ours.step()
        theirs.step()
        for plan in plans:
            plan.step()
        assert plans[0].get_last_lr() == plans[1].get_last_lr()
    assert_same_state(ours, theirs, mine, other)


def test_closure_is_called_with_gradients_on_and_its_loss_returned(kernels):
    (p,) = parameters([(16,)])
    ours = CPUAdam([p], kernels=kernels)
    assert ours.step() is None
    before = p.detach().clone()

    def closure():
        ours.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    loss = ours.step(closure)
    assert loss.item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(p.detach(), before)


def test_parameters_without_a_gradient_are_left_alone(kernels):
    mine, other = twins([(32,), (16,)])
    ours, theirs = CPUAdam(mine, weight_decay=0.1, kernels=kernels), torch_adam(other, weight_decay=0.1)
    for step in range(6):
        give_gradients(step, mine, other)
        if step % 2:
            mine[1].grad = other[1].grad = None
        ours.step()
        theirs.step()
    assert_same_state(ours, theirs, mine, other)
    assert ours.state[mine[1]]["step"] == 3


@pytest.mark.parametrize("at", [0, 1, 3])
def test_empty_scalar_and_one_element_parameters(kernels, at):
    """C-15: an empty parameter first, in the middle, last; shapes are kept."""
    shapes = [(), (1,), (16,)]
    shapes.insert(at, (0, 8))
    mine, other = twins(shapes)
    ours, theirs = CPUAdam(mine, lr=0.1, kernels=kernels), torch_adam(other, lr=0.1)
    for step in range(5):
        give_gradients(step, mine, other)
        ours.step()
        theirs.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
        assert ours.state[p]["exp_avg"].shape == p.shape
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert ours.state[mine[at]]["exp_avg"].shape == (0, 8)


def test_several_dtypes_in_one_group(kernels):
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    mixed = [parameters([(48,)], d, seed=i)[0] for i, d in enumerate(dtypes)]
    masters = [p.detach().float().requires_grad_() for p in mixed]
    ours, theirs = CPUAdam(mixed, lr=1e-2, kernels=kernels), torch_adam(masters, lr=1e-2)
    for step in range(10):
        give_gradients(step, mixed)
        for p, q in zip(mixed, masters, strict=True):
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(mixed[0], masters[0])
    assert torch.equal(merge(mixed[1].detach(), ours.state[mixed[1]]["remainder"]), masters[1].detach())
    assert torch.equal(ours.state[mixed[2]]["master"], masters[2].detach())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "every second column": lambda t: t[:, ::2],
    "expanded room": lambda t: t[1:, 3:],
    "shifted": lambda t: t.reshape(-1)[1:],
    "channels last": lambda t: t.reshape(4, 4, 8, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["same", "contiguous", "strided"])
def test_non_contiguous_parameters_and_gradients(kernels, layout, grad_layout):
    def make(dtype):
        room = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
        return LAYOUTS[layout](room).requires_grad_()

    for dtype in (torch.float32, torch.bfloat16):
        strided, plain = make(dtype), make(dtype).detach().contiguous().requires_grad_()
        ours = CPUAdam([strided], lr=1e-2, weight_decay=0.1, kernels=kernels)
        reference = CPUAdam([plain], lr=1e-2, weight_decay=0.1, kernels=kernels)
        for step in range(4):
            give_gradients(step, [plain])
            grad = plain.grad
            if grad_layout == "same":
                grad = torch.empty_like(strided).copy_(grad)
            elif grad_layout == "strided":
                grad = torch.stack([grad, grad], dim=-1)[..., 0]
            strided.grad = grad
            ours.step()
            reference.step()
        assert torch.equal(strided, plain)
        assert torch.equal(ours.state[strided]["exp_avg_sq"], reference.state[plain]["exp_avg_sq"])


def test_a_strided_parameter_leaves_its_neighbours_alone(kernels):
    room = torch.ones(8, 8)
    p = room[:, ::2].requires_grad_()
    p.grad = torch.ones(8, 4)
    CPUAdam([p], lr=0.5, kernels=kernels).step()
    assert torch.equal(room[:, 1::2], torch.ones(8, 4))
    assert (room[:, ::2] != 1).all()


def test_layout_changed_after_the_first_step(kernels):
    (p,) = parameters([(8, 8)])
    (q,) = parameters([(8, 8)])
    ours, theirs = CPUAdam([p], kernels=kernels), torch_adam([q])
    for step in range(4):
        if step == 2:
            p.data = p.data.t().contiguous().t()
        give_gradients(step, [p], [q])
        ours.step()
        theirs.step()
    assert_same_state(ours, theirs, [p], [q])


def test_model_trains_like_torch_and_autograd_sees_the_update(kernels):
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    other = copy.deepcopy(mine)
    ours = CPUAdam(mine.parameters(), lr=1e-2, kernels=kernels)
    theirs = torch_adam(other.parameters(), lr=1e-2)
    for _ in range(5):
        x = torch.randn(4, 16)
        for model, optimizer in ((mine, ours), (other, theirs)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_same_state(ours, theirs, list(mine.parameters()), list(other.parameters()))
    loss = mine(x).square().mean()
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_grad_multiplier_scales_every_gradient(kernels):
    mine, other = twins([(32,), (48,)])
    ours, reference = CPUAdam(mine, kernels=kernels), CPUAdam(other, kernels=kernels)
    give_gradients(0, mine, other)
    for q in other:
        q.grad *= 0.25
    ours.step(grad_multiplier=0.25)
    reference.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, other, strict=True))


# ---- state dicts ----


def trained(kernels, dtype, steps=4):
    params = parameters([(32,), (16, 3)], dtype)
    optimizer = CPUAdam(params, lr=1e-2, weight_decay=0.1, kernels=kernels)
    for step in range(steps):
        give_gradients(step, params)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_resumes_bit_for_bit(kernels, dtype, tmp_path):
    """D-02 in small: 4 + 4 steps through a file equal 8 straight ones."""
    params, optimizer = trained(kernels, dtype)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    fresh = [p.detach().clone().requires_grad_() for p in params]
    resumed = CPUAdam(fresh, kernels=kernels)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for step in range(4, 8):
        give_gradients(step, params, fresh)
        optimizer.step()
        resumed.step()
    for p, q in zip(params, fresh, strict=True):
        assert torch.equal(bits(p.detach()), bits(q.detach()))
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key])
            assert value.dtype == resumed.state[q][key].dtype


@pytest.mark.parametrize("adamw", [True, False])
def test_state_dicts_go_to_torch_and_back(kernels, adamw):
    mine, other = twins([(32,), (16, 3)])
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    ours = CPUAdam(mine, adamw_mode=adamw, kernels=kernels, **options)
    theirs = torch_adam(other, adamw=adamw, **options)
    for step in range(12):
        if step in (4, 8):
            mine_state, their_state = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
            ours = CPUAdam(mine, kernels=kernels)
            theirs = torch_adam(other, adamw=adamw)
            ours.load_state_dict(their_state)
            theirs.load_state_dict(mine_state)
            assert set(mine_state["param_groups"][0]) >= set(their_state["param_groups"][0])
        give_gradients(step, mine, other)
        ours.step()
        theirs.step()
    assert_same_state(ours, theirs, mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_torch_state_dict_without_a_master_starts_from_the_parameter(kernels, dtype):
    params, other = twins([(32,)], dtype)
    theirs = torch.optim.AdamW(other, lr=1e-2)
    give_gradients(0, other)
    theirs.step()
    ours = CPUAdam(params, kernels=kernels)
    ours.load_state_dict(theirs.state_dict())
    state = ours.state[params[0]]
    assert state["exp_avg"].dtype is torch.float32
    assert torch.equal(state["exp_avg"], theirs.state[other[0]]["exp_avg"].float())
    if dtype is torch.bfloat16:
        assert not state["remainder"].any()
    else:
        assert torch.equal(state["master"], params[0].detach().float())


def test_loaded_state_shares_no_memory(kernels):
    params, optimizer = trained(kernels, torch.float32)
    saved = optimizer.state_dict()
    other = CPUAdam([p.detach().clone().requires_grad_() for p in params], kernels=kernels)
    other.load_state_dict(saved)
    theirs = other.state_dict()["state"][0]["exp_avg"]
    assert theirs.data_ptr() != saved["state"][0]["exp_avg"].data_ptr()


def test_a_state_dict_that_does_not_fit_changes_nothing(kernels):
    params, optimizer = trained(kernels, torch.bfloat16)
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["state"][1]["exp_avg"] = torch.zeros(7)
    bad["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"parameter 1 of group 0, shape \(16, 3\).*exp_avg has shape \(7,\)"):
        optimizer.load_state_dict(bad)
    amsgrad = copy.deepcopy(before)
    amsgrad["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(amsgrad)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][1]["exp_avg"], before["state"][1]["exp_avg"])
    assert params[0].grad is not None


def test_users_hooks_see_plain_tensors(kernels):
    _, optimizer = trained(kernels, torch.bfloat16)
    seen: list[type] = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(type(s["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(type(o.state_dict()["state"][0]["exp_avg"])))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.Tensor, torch.Tensor]


def test_copies_and_added_groups_work(kernels):
    params, optimizer = trained(kernels, torch.float32)
    twin = copy.deepcopy(optimizer)  # has its own parameters and kernels
    (late,) = parameters([(16,)], seed=9)
    optimizer.add_param_group({"params": late, "lr": 0.1, "adamw_mode": False})
    assert optimizer.param_groups[1]["decoupled_weight_decay"] is False
    give_gradients(7, params)
    late.grad = torch.ones(16)
    optimizer.step()
    copies = twin.param_groups[0]["params"]
    give_gradients(7, copies)
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    assert optimizer.state[late]["step"] == 1


def test_a_forked_child_trains_on(kernels):
    (p,) = parameters([(100_000,)])
    give_gradients(0, [p])
    ours = CPUAdam([p], num_threads=2)
    ours.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: what is tested
        child = os.fork()
    if child == 0:
        code = 1
        try:
            before = p.detach().clone()
            ours.step()
            code = 0 if not torch.equal(p.detach(), before) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- refusals ----


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(3, dtype=torch.complex64), r"parameter 1 of group 0, shape \(3,\).*complex64"),
        (torch.zeros(3, 2, dtype=torch.int32), r"parameter 1 of group 0, shape \(3, 2\).*int32"),
        (torch.zeros(3, dtype=torch.float64), "float64.*float32, bfloat16 and float16"),
        (torch.zeros(3, device="meta"), "on meta"),
    ],
)
def test_parameters_it_cannot_update_are_refused_at_once(kernels, param, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CPUAdam([torch.zeros(1), param], kernels=kernels)


def test_sparse_gradients_are_refused_before_anything_changes(kernels):
    """C-21: named by index and shape, and no other parameter is updated in that step."""
    table = torch.nn.Embedding(10, 4, sparse=True)
    dense = torch.nn.Parameter(torch.ones(4))
    ours = CPUAdam([dense, table.weight], kernels=kernels)
    (table(torch.tensor([1, 2])).sum() + dense.sum()).backward()
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0, shape \(10, 4\).*sparse=False"):
        ours.step()
    assert torch.equal(dense.detach(), torch.ones(4))
    assert len(ours.state) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": math.nan}, "lr = nan"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"amsgrad": True}, "amsgrad is not supported"),
    ],
)
def test_senseless_options_of_an_optimizer_are_refused(kernels, options, message):
    with pytest.raises(ValueError, match=message):
        CPUAdam(parameters([(3,)]), kernels=kernels, **options)
    good = CPUAdam(parameters([(3,)]), kernels=kernels)
    good.param_groups[0].update(options)
    good.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(ValueError, match=message):
        good.step()

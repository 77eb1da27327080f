"""CPUAdam where torch code uses an optimizer: schedulers, pickles, hooks, torch's own options, bound cores."""

import copy
import hashlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina.zero.adam.cpu_adam import CPUAdam
from lamina.zero.adam.kernels import Kernels, default_num_threads


@pytest.fixture(scope="module")
def kernels():
    with Kernels(2) as made:
        yield made


def pair(kernels, **options):
    params = [torch.linspace(-1, 1, 64).requires_grad_() for _ in range(2)]
    ours = CPUAdam([params[0]], lr=1e-2, kernels=kernels, **options)
    theirs = torch.optim.AdamW([params[1]], lr=1e-2, weight_decay=0.0, fused=True, **options)
    return params, ours, theirs


def step_both(params, optimizers, index: int) -> None:
    for p, optimizer in zip(params, optimizers, strict=True):
        p.grad = torch.cos(torch.arange(64.0) + index)
        optimizer.step()


def chained(o):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)])


def sequential(o):
    parts = [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.SequentialLR(o, parts, milestones=[3])


MAKERS: dict[str, Callable] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=True, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=9),
}


def test_every_scheduler_of_torch_is_tried():
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - set(MAKERS) == {"LRScheduler"}


@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_set_the_rate_and_betas_that_are_used(kernels, name):
    params, ours, theirs = pair(kernels)
    plans = [MAKERS[name](o) for o in (ours, theirs)]
    for index in range(8):
        step_both(params, (ours, theirs), index)
        for plan in plans:
            plan.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"]
        assert torch.equal(*params), index


def test_swa_and_ema_models_follow_it(kernels):
    model = torch.nn.Linear(16, 16)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ours = CPUAdam(model.parameters(), lr=0.1, kernels=kernels)
    schedule = torch.optim.swa_utils.SWALR(ours, swa_lr=0.05)
    for _ in range(3):
        ours.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        ours.step()
        averaged.update_parameters(model)
        schedule.step()
    assert not torch.equal(averaged.module.weight, model.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_copies_go_on_as_the_original(how, dtype):
    original = CPUAdam([torch.linspace(-1, 1, 40).to(dtype).requires_grad_()], lr=0.05, num_threads=1)

    def step(optimizer: CPUAdam) -> torch.Tensor:
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.ones(40, dtype=dtype)
        optimizer.step()
        return p.detach()

    step(original)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(original))
    elif how == "deepcopy":
        twin = copy.deepcopy(original)
    else:
        file = io.BytesIO()
        torch.save(original, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    for _ in range(3):
        assert torch.equal(step(original), step(twin))
    assert twin.param_groups[0]["params"][0] is not original.param_groups[0]["params"][0]
    assert torch.equal(*(o.state[o.param_groups[0]["params"][0]]["step"] for o in (original, twin)))


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": True}, {"fused": None, "foreach": None}, {"foreach": False, "capturable": False}],
)
def test_options_of_torch_that_ask_for_what_this_is_are_taken(kernels, options):
    params, ours, theirs = pair(kernels)
    ours = CPUAdam([params[0]], lr=1e-2, kernels=kernels, **options)
    step_both(params, (ours, theirs), 1)
    assert torch.equal(*params)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": False}, {"capturable": True}, {"differentiable": True}]
)
def test_options_of_torch_that_it_cannot_follow_are_refused(kernels, options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*leave these options out"):
        CPUAdam([torch.ones(3)], kernels=kernels, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "1e-3"}, r"group 0: lr = '1e-3' is of type str; give a number"),
        ({"lr": None}, "group 0: lr = None is of type NoneType"),
        ({"betas": (0.9, "0.99")}, r"betas\[1\] = '0.99' is of type str"),
        ({"eps": b"1e-8"}, "eps = b'1e-8' is of type bytes"),
        ({"weight_decay": 1j}, "weight_decay = 1j is of type complex"),
    ],
)
def test_options_that_are_no_numbers_are_refused(kernels, options, message):
    """Text comes from configuration files; YAML reads 1e-3 as text."""
    with pytest.raises(TypeError, match=message):
        CPUAdam([torch.ones(3)], kernels=kernels, **options)
    good = CPUAdam([torch.ones(3)], kernels=kernels)
    good.param_groups[0].update(options)
    good.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(TypeError, match=message):
        good.step()
    assert len(good.state) == 0


def test_numbers_of_any_kind_are_options(kernels):
    params = [torch.ones(3)], [torch.ones(3)]
    kinds = CPUAdam(params[0], lr=np.float32(0.5), eps=Fraction(1, 2), weight_decay=1, kernels=kernels)
    plain = CPUAdam(params[1], lr=0.5, eps=0.5, weight_decay=1.0, kernels=kernels)
    for optimizer in (kinds, plain):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(params[0][0], params[1][0])


def test_the_state_dict_of_a_foreach_adam_loads(kernels):
    params, ours, _ = pair(kernels)
    theirs = torch.optim.AdamW([params[1]], lr=1e-2, foreach=True)
    params[1].grad = torch.ones(64)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[params[0]]["step"] == 1
    params[0].grad = torch.ones(64)
    ours.step()
    assert ours.state[params[0]]["step"] == 2


def test_step_hooks_and_closures_run(kernels):
    params, ours, _ = pair(kernels)
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    params[0].grad = torch.ones(64)
    assert ours.step(lambda: seen.append("closure") or 3.5) == 3.5
    assert seen == ["before", "closure", "after"]


def test_hooks_of_all_optimizers_run_and_may_change_the_arguments(kernels):
    params, ours, _ = pair(kernels)
    seen = []
    params[0].grad = torch.ones(64)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
        ours.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "closure": lambda: 2.5})),
        register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
    ]
    try:
        assert ours.step() == 2.5
    finally:
        for handle in handles:
            handle.remove()
    assert ours.step() is None
    assert seen == ["before all", "after all"]


def test_hooks_of_a_subclass_run_once(kernels):
    class Counting(CPUAdam):
        def step(self, closure=None, *, grad_multiplier=1.0):
            return super().step(closure, grad_multiplier=grad_multiplier)

    param = torch.ones(16, requires_grad=True)
    seen = []
    for kind in (CPUAdam, Counting, Counting):
        optimizer = kind([param], kernels=kernels)
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(type(o).__name__))
        optimizer.step()
    assert seen == ["CPUAdam", "Counting", "Counting"]


def test_the_profiler_sees_its_steps(kernels):
    _, ours, _ = pair(kernels)
    ours.step()
    with torch.profiler.profile() as profile:
        ours.step()
    assert [e.count for e in profile.key_averages() if e.key == "Optimizer.step#CPUAdam.step"] == [1]


def test_no_graph_is_made_of_a_step(kernels):
    """With gradients on: of a rate that wants one, of parameters and gradients that are copied on the way."""
    param = torch.linspace(-1, 1, 64).reshape(8, 8).t().requires_grad_()[:, ::2].detach().requires_grad_()
    half = torch.ones(16, dtype=torch.float16, requires_grad=True)
    lr = torch.tensor(0.5, requires_grad=True)
    ours = CPUAdam([param, half], lr=lr, kernels=kernels)
    for _ in range(2):
        param.grad = torch.ones(4, 8).t()
        half.grad = torch.ones(16, dtype=torch.float16)
        with torch.enable_grad():
            ours.step()
    for p in (param, half):
        assert p.is_leaf
        assert not any(value.requires_grad for value in ours.state[p].values())


def test_gradient_clipping_and_scaling_of_torch_go_before_it(kernels):
    params, ours, theirs = pair(kernels)
    for p, optimizer in zip(params, (ours, theirs), strict=True):
        p.grad = torch.arange(64.0)
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        optimizer.step()
    assert torch.equal(*params)


def test_named_parameters_are_taken(kernels):
    model = torch.nn.Linear(4, 4)
    ours = CPUAdam(model.named_parameters(), kernels=kernels)
    assert ours.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    model(torch.ones(1, 4)).sum().backward()
    ours.step()


def test_bound_cores_change_nothing_but_where_it_runs(kernels):
    params, _, _ = pair(kernels)
    core = min(os.sched_getaffinity(0))
    with torch.no_grad():
        big = [torch.linspace(-1, 1, 160_000).requires_grad_() for _ in range(2)]
    bound = CPUAdam([params[0], big[0]], lr=1e-2, cores=[core])
    plain = torch.optim.AdamW([params[1], big[1]], lr=1e-2, weight_decay=0.0, fused=True)
    for mine, other in ((params[0], params[1]), (big[0], big[1])):
        mine.grad = torch.sin(torch.arange(float(mine.numel())))
        other.grad = mine.grad.clone()
    for _ in range(3):
        bound.step()
        plain.step()
    assert torch.equal(*params)
    assert torch.equal(*big)
    assert bound._live_kernels().num_threads == 1  # one for each core named; the caller only waits


def trained_digest(threads: int | None) -> str:
    """A hash of the bits after a few steps; also what each process of the next test prints."""
    p = torch.linspace(-1, 1, 300_003).requires_grad_()
    ours = CPUAdam([p], lr=1e-2, num_threads=threads)
    for step in range(5):
        p.grad = torch.cos(torch.arange(300_003.0) + step)
        ours.step()
    return f"{ours._live_kernels().num_threads} {hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()}"


def test_two_processes_at_once_share_the_cores_and_get_the_same_bits(tmp_path, monkeypatch):
    """F-03: what launchers set (OMP_NUM_THREADS=1, two local ranks) neither slows one to a single thread nor changes a bit."""
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert default_num_threads() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom {__name__} import trained_digest\nprint(trained_digest(None))"
    )
    outputs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = []
    for output in outputs:
        with output.open("w") as file:
            ranks.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=file))
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    _, wanted = trained_digest(1).split()
    for output in outputs:
        threads, digest = output.read_text().split()
        assert int(threads) == max(1, cores // 2)
        assert digest == wanted

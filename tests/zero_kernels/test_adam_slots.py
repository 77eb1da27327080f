"""Updates that CPUAdam keeps from step to step stay right whatever is changed between steps."""

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from planes import bits

from lamina.zero.adam.cpu_adam import CPUAdam
from lamina.zero.adam.kernels import Kernels

SHAPES = [(16,), (4, 8), (2, 3, 16), (32,), (8, 8)]


@pytest.fixture(scope="module")
def kernels():
    with Kernels(2) as made:
        yield made


class Twins:
    """CPUAdam beside torch's fused AdamW on equal parameters; every change is made to both."""

    def __init__(self, kernels: Kernels, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(s, generator=self.generator) for s in SHAPES]
        self.params = [[v.clone().requires_grad_() for v in values] for _ in range(2)]
        split = [[{"params": p[:3], "lr": 1e-2}, {"params": p[3:], "weight_decay": 0.1}] for p in self.params]
        self.ours = CPUAdam(split[0], weight_decay=0.01, kernels=kernels)
        self.theirs = torch.optim.AdamW(split[1], weight_decay=0.01, fused=True)
        self.optimizers = (self.ours, self.theirs)

    def pick(self) -> int:
        return self.random.randrange(len(self.params[0]))

    def new_gradients(self) -> None:
        for pair in zip(*self.params, strict=True):
            grad = torch.randn(pair[0].shape, generator=self.generator)
            for p in pair:
                p.grad = grad.clone()

    def same_gradients_in_place(self) -> None:
        for pair in zip(*self.params, strict=True):
            for p in pair:
                if p.grad is not None:
                    p.grad.mul_(1.5)

    def no_gradient(self) -> None:
        which = self.pick()
        for params in self.params:
            params[which].grad = None

    def other_layout_of_a_parameter(self) -> None:
        p = self.params[0][
            self.random.choice([1, 4])
        ]  # torch's fused kernel takes elements in memory's order: only ours
        p.data = p.data.t().contiguous().t()

    def other_layout_of_a_gradient(self) -> None:
        p = self.params[0][4]
        if p.grad is not None:
            p.grad = p.grad.t().contiguous().t()

    def moved_parameter(self) -> None:
        which = self.pick()
        for params in self.params:
            params[which].data = params[which].data.clone()

    def replaced_state(self) -> None:
        which = self.pick()
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            state = optimizer.state.get(params[which])
            if state:
                state["exp_avg"] = state["exp_avg"] * 0.5

    def forgotten_state(self) -> None:
        which = self.pick()
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            optimizer.state.pop(params[which], None)

    def step_count_set_by_hand(self) -> None:
        which, count = self.pick(), self.random.randrange(1, 50)
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            if optimizer.state.get(params[which]):
                optimizer.state[params[which]]["step"].fill_(count)

    def other_options(self) -> None:
        change = self.random.choice([{"lr": 0.05}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.3}, {"maximize": True}])
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(change)

    def one_more_parameter(self) -> None:
        value = torch.randn(16, generator=self.generator)
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            params.append(value.clone().requires_grad_())
            optimizer.add_param_group({"params": [params[-1]], "lr": 0.1})

    def reloaded(self) -> None:
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())

    def moved_in_its_group(self) -> None:
        for optimizer in self.optimizers:
            group = optimizer.param_groups[0]["params"]
            group.append(group.pop(0))


CHANGES: list[Callable[[Twins], None]] = [
    value for name, value in vars(Twins).items() if not name.startswith("_") and name != "pick"
]


@pytest.mark.parametrize("seed", range(12))
def test_any_change_between_steps_is_seen(kernels, seed):
    twins = Twins(kernels, seed)
    done: list[str] = []
    for _ in range(60):
        change = twins.random.choice(CHANGES)
        done.append(change.__name__)
        change(twins)
        for optimizer in twins.optimizers:
            optimizer.step()
        for mine, other in zip(*twins.params, strict=True):
            assert torch.equal(bits(mine.detach()), bits(other.detach())), done
            state, wanted = twins.ours.state.get(mine, {}), twins.theirs.state.get(other, {})
            assert state.keys() == wanted.keys(), done
            assert all(torch.equal(state[key], wanted[key]) for key in wanted), done


def test_a_gradient_of_another_dtype_or_at_another_address_is_read(kernels):
    p, q = (torch.ones(64).requires_grad_() for _ in range(2))
    ours, reference = CPUAdam([p], lr=0.1, kernels=kernels), CPUAdam([q], lr=0.1, kernels=kernels)
    for index, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]):
        grad = torch.linspace(-1, 1, 64 + index).to(dtype)[index:]  # at an odd offset too
        p.grad = q.grad = None
        p.grad_dtype = q.grad_dtype = dtype
        p.grad = grad
        q.grad = grad.clone()
        ours.step()
        reference._slots.__init__()  # forgets everything
        reference.step()
        assert torch.equal(p, q)


def test_a_gradient_of_another_shape_is_refused_before_anything_changes(kernels):
    p, other = torch.ones(64).requires_grad_(), torch.ones(16).requires_grad_()
    ours = CPUAdam([other, p], lr=0.1, kernels=kernels)
    p.grad, other.grad = torch.ones(64), torch.ones(16)
    ours.step()
    before = other.detach().clone()
    p.data = torch.ones(32)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0, shape \(32,\).*gradient has shape \(64,\)"):
        ours.step()
    assert torch.equal(other.detach(), before)
    assert ours.state[other]["step"] == 1


def test_a_state_of_another_shape_is_refused(kernels):
    p = torch.ones(64).requires_grad_()
    ours = CPUAdam([p], kernels=kernels)
    p.grad = torch.ones(64)
    ours.step()
    ours.state[p]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"exp_avg is torch.float32 of shape \(3,\).*\(64,\)"):
        ours.step()


def test_a_step_that_fails_counts_nothing():
    p = torch.ones(64).requires_grad_()
    p.grad = torch.ones(64)
    with Kernels(1) as closing:
        ours = CPUAdam([p], kernels=closing)
        ours.step()
    with pytest.raises(ValueError, match="closed"):
        ours.step()
    assert ours.state[p]["step"] == 1


def test_gradients_that_are_gone_are_not_kept_alive(kernels):
    p = torch.ones(64).requires_grad_()
    p.grad = torch.ones(64)
    ours = CPUAdam([p], kernels=kernels)
    ours.step()
    gone = weakref.ref(p.grad)
    ours.zero_grad()
    assert gone() is None

"""Adam in C gives the bits of torch's fused CPU Adam where that has whole vectors, on every dispatch path."""

import contextlib
import itertools
from collections.abc import Sequence

import pytest
import torch

from lamina.zero.adam.kernels import AdamHyper, AdamPlanes, DType, Kernels, available_paths

PATHS = available_paths()
GRID = list(
    itertools.product(
        [1e-3, 0.05],
        [(0.9, 0.999), (0.0, 0.999), (0.4, 0.5), (0.5, 0.9), (0.9, 0.95)],
        [1e-8, 1e-3, 1e-15],
        [0.0, 0.1],
        [False, True],
        [True, False],
    )
)


def step(kernels: Kernels, hyper: AdamHyper, state: list[torch.Tensor], grad: torch.Tensor) -> None:
    param, exp_avg, exp_avg_sq = state
    planes = AdamPlanes(
        n=param.numel(),
        param=param.data_ptr(),
        param_dtype=DType.FP32,
        grad=grad.data_ptr(),
        grad_dtype=DType.FP32,
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
    )
    kernels.adam(planes, hyper)


def compare_with_torch(paths: Sequence[str], numel: int, steps: int, config: tuple, seed: int) -> None:
    """All paths against one reference, after every step."""
    lr, (beta1, beta2), eps, weight_decay, maximize, adamw = config
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(numel, generator=random)
    reference = start.clone().requires_grad_()
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind(
        [reference],
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        fused=True,
    )
    states = {path: [start.clone(), torch.zeros(numel), torch.zeros(numel)] for path in paths}
    with contextlib.ExitStack() as stack:
        kernels = {path: stack.enter_context(Kernels(1 + (numel > 20_000), path=path)) for path in paths}
        for t in range(1, steps + 1):
            scale = 10.0 ** torch.randint(-4, 3, (numel,), generator=random)
            grad = torch.randn(numel, generator=random) * scale
            reference.grad = grad.clone()
            optimizer.step()
            hyper = AdamHyper(
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                step=t,
                adamw_mode=adamw,
                maximize=maximize,
            )
            wanted = optimizer.state[reference]
            for path, state in states.items():
                step(kernels[path], hyper, state, grad)
                assert torch.equal(state[1], wanted["exp_avg"]), (path, t)
                assert torch.equal(state[2], wanted["exp_avg_sq"]), (path, t)
                assert torch.equal(state[0], reference.detach()), (path, t)


def test_grid_of_options_matches_fused_torch_bit_for_bit() -> None:
    for seed, config in enumerate(GRID):
        compare_with_torch(PATHS, 1600, 5, config, seed)


@pytest.mark.parametrize("adamw", [True, False])
def test_thousand_steps_match_fused_torch_bit_for_bit(adamw: bool) -> None:
    compare_with_torch(PATHS, 160, 1000, (1e-3, (0.9, 0.999), 1e-8, 0.01, False, adamw), 7)
    compare_with_torch(PATHS, 40960, 20, (1e-3, (0.9, 0.999), 1e-8, 0.01, False, adamw), 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_thousand_steps_of_the_whole_grid_match_fused_torch_bit_for_bit(part: int) -> None:
    """240 sets of options, each with one of four lengths, 1,000 steps, on every path of this processor."""
    lengths = (16, 48, 160, 1600)
    for seed, config in list(enumerate(GRID))[part::4]:
        compare_with_torch(PATHS, lengths[(seed + seed // 4) % 4], 1000, config, 1000 + seed)

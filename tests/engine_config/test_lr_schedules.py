"""Schedules against values of DeepSpeed 0.19.8 (taken once, as printed) and against plain formulas."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.lr_schedules import (
    SCHEDULES,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_schedule,
)

# Rates of consecutive optimizer steps. For the warm-up schedules DeepSpeed's list starts with its first value once
# more ([Note: what a schedule counts]); it is left out here.
DEEPSPEED: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02},
        [0.02, 0.06, 0.08339850002884626, 0.1, 0.1, 0.1],
    ),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01]),
    ("WarmupLR", {"warmup_num_steps": 1}, [0.0, 0.01, 0.01]),
    (
        "WarmupDecayLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02},
        [0.02, 0.06, 0.08339850002884626, 0.1, 0.1, 0.08666666666666667, 0.07333333333333333, 0.06,
         0.04666666666666666, 0.03333333333333333, 0.02, 0.02],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
        [0.001, 0.0055, 0.008132331253245204, 0.01, 0.009363620667976085, 0.007625, 0.00525, 0.002875,
         0.0011363793320239163, 0.0005, 0.0005],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0025, 0.005, 0.0075, 0.009330194006220302],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
         "decay_step_size": 2, "decay_lr_rate": 0.5},
        [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.085, 0.07, 0.055, 0.04, 0.025, 0.01, 0.008, 0.006666666666666667,
         0.005714285714285714, 0.005],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0.01, 0.01, 0.055, 0.055, 0.1, 0.055, 0.055, 0.01, 0.01, 0.01],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
        [0.01, 0.016666666666666666, 0.02333333333333333, 0.03, 0.03666666666666667],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0,
         "lr_range_test_staircase": True},
        [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05],
    ),
]  # fmt: skip


def optimizer(*lrs: float, lr: float = 0.01) -> torch.optim.AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in lrs or (lr,)]
    return torch.optim.AdamW(groups, lr=lr)


def run(schedule: Schedule, steps: int) -> list[list[float]]:
    """The rates that the param groups hold when each of `steps` optimizer steps is taken."""
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in schedule.optimizer.param_groups])
        assert schedule.get_last_lr() == used[-1]
        schedule.step()
    return used


@pytest.mark.parametrize(("name", "params", "wanted"), DEEPSPEED)
def test_rates_are_deepspeeds(name: str, params: dict[str, Any], wanted: list[float]) -> None:
    used = run(make_schedule(name, params, optimizer()), len(wanted))
    assert [rates[0] for rates in used] == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_one_cycle_moves_the_momentum_the_other_way() -> None:
    # DeepSpeed's values from its first step() on; it starts at the wrong end before that.
    wanted = [0.9, 0.875, 0.85, 0.825, 0.8, 0.8166666666666667, 0.8333333333333334, 0.85]
    adam = optimizer()
    schedule = OneCycle(adam, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4, cycle_second_step_size=6)
    used = []
    for _ in wanted:
        used.append(adam.param_groups[0]["betas"])
        schedule.step()
    assert [first for first, _ in used] == pytest.approx(wanted)
    assert {second for _, second in used} == {0.999}
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    OneCycle(sgd, cycle_min_lr=0.01, cycle_max_lr=0.1)
    assert sgd.param_groups[0]["momentum"] == 0.9


def test_momentum_decay_stays_below_one() -> None:
    schedule = OneCycle(
        optimizer(), cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.3
    )
    assert 0.9 < (schedule.momentum(50) or 0) < 1


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("peak", [None, 3e-6])
def test_e08_peak_is_the_optimizers_and_step_one_uses_the_first_value(warmup: int, peak: float | None) -> None:
    adam = optimizer(lr=5e-7)
    schedule = WarmupLR(adam, warmup_num_steps=warmup, warmup_max_lr=peak)
    used = [rates[0] for rates in run(schedule, 12)]
    top = peak or 5e-7
    assert used[0] == (top if warmup == 0 else 0.0)
    assert used[-1] == max(used) == top


def test_c17_own_rates_of_param_groups_survive() -> None:
    own = (1e-2, 1e-3, 0.0)
    params: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_num_steps": 3},
        "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_max_lr": 5e-3},
        "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8},
        "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
        "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3},
    }
    assert set(params) == set(SCHEDULES)
    for name, given_params in params.items():
        for first, second, third in run(make_schedule(name, given_params, optimizer(*own, lr=1e-2)), 10):
            assert second == pytest.approx(first / 10, rel=1e-12), name
            assert third == 0.0, name


def test_a_single_rate_is_that_of_groups_with_the_default_rate() -> None:
    schedule = WarmupLR(optimizer(1e-2, 1e-3, lr=1e-3), warmup_max_lr=2e-3, warmup_num_steps=0)
    assert schedule.get_last_lr() == pytest.approx([2e-2, 2e-3])
    # Equal groups take the number as it is, whatever the class's default rate.
    schedule = WarmupLR(optimizer(5e-4, 5e-4, lr=1e-3), warmup_max_lr=2e-3, warmup_num_steps=0)
    assert schedule.get_last_lr() == [2e-3, 2e-3]


def test_lists_give_each_group_its_rate() -> None:
    schedule = WarmupLR(optimizer(1e-2, 1e-3), warmup_max_lr=[0.3, 0.4], warmup_num_steps=0)
    assert schedule.get_last_lr() == [0.3, 0.4]
    with pytest.raises(ValueError, match="warmup_max_lr lists 3 rates, and the optimizer has 2 param groups"):
        WarmupLR(optimizer(1e-2, 1e-3), warmup_max_lr=[0.3, 0.4, 0.5])


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_d11_resume_sets_the_rate_in_use(name: str) -> None:
    params: dict[str, Any] = {
        "WarmupLR": {"warmup_num_steps": 9},
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 3},
        "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 3},
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
        "LRRangeTest": {},
    }[name]
    straight = make_schedule(name, params, optimizer(1e-2, 1e-3))
    wanted = run(straight, 14)
    first = make_schedule(name, params, optimizer(1e-2, 1e-3))
    run(first, 7)
    state = json.loads(json.dumps(first.state_dict()))
    # The new process' optimizer may hold rates of any kind by then.
    second = make_schedule(name, params, optimizer(7e-2, 7e-3))
    second.load_state_dict(state)
    assert run(second, 7) == wanted[7:]


def test_state_of_another_schedule_is_refused() -> None:
    state = WarmupLR(optimizer()).state_dict()
    with pytest.raises(ValueError, match="state of 'WarmupLR', and the schedule is WarmupCosineLR"):
        WarmupCosineLR(optimizer(), total_num_steps=10).load_state_dict(state)
    with pytest.raises(ValueError, match="1 param groups, and the optimizer has 2"):
        WarmupLR(optimizer(1e-2, 1e-3)).load_state_dict(state)


def test_a_group_added_later_is_an_error() -> None:
    adam = optimizer()
    schedule = WarmupLR(adam)
    adam.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="made for 1 param groups, and the optimizer has 2"):
        schedule.step()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"warmup_num_steps": -1}, "warmup_num_steps of at least 0, got -1"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps of at least 0, got 2.5"),
        ({"warmup_type": "cubic"}, 'want warmup_type "log" or "linear", got \'cubic\''),
    ],
)
def test_nonsense_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule("WarmupLR", params, optimizer())
    with pytest.raises(ValueError, match="no schedule 'Warmup'"):
        make_schedule("Warmup", {}, optimizer())


@given(warmup=st.integers(0, 30), extra=st.integers(1, 60))
def test_decay_and_cosine_rise_then_fall(warmup: int, extra: int) -> None:
    total = warmup + extra
    for schedule in (
        WarmupDecayLR(optimizer(), total_num_steps=total, warmup_num_steps=warmup),
        WarmupCosineLR(optimizer(), total_num_steps=total, warmup_num_steps=warmup),
    ):
        rates = [schedule.rate(step) for step in range(total + 5)]
        peak = rates.index(max(rates))
        assert rates[:peak] == sorted(rates[:peak])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert all(0 <= rate <= 0.01 + 1e-15 and math.isfinite(rate) for rate in rates)
        assert rates[-1] <= 0.01 * 1e-4 + 1e-15

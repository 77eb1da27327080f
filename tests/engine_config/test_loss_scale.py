"""The loss scale against a plain transcription of the rule with absolute step numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.loss_scale import (
    DynamicLossScaler,
    LossScaleError,
    ScalePolicy,
    StaticLossScaler,
    advance,
)


def reference(policy: ScalePolicy, overflows: list[bool]) -> list[float]:
    """The same rule told by the number of the last overflow. inf after the scale had to fall below the least."""
    scale, left, last, scales = policy.initial_scale, policy.hysteresis, -1, []
    for number, overflow in enumerate(overflows):
        if overflow:
            last = number
            if left > 1:
                left -= 1
            elif scale <= policy.min_scale:
                return [*scales, float("inf")]
            else:
                scale = max(scale / 2, policy.min_scale)
        else:
            if policy.consecutive_hysteresis:
                left = policy.hysteresis
            stable = number - last - 1
            if stable > 0 and stable % policy.window == 0:
                left = policy.hysteresis
                scale *= 2
        scales.append(scale)
    return scales


@given(
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
    power=st.integers(0, 5),
    overflows=st.lists(st.booleans(), max_size=60),
    pause=st.integers(0, 60),
)
def test_scale_follows_the_rule(
    window: int, hysteresis: int, consecutive: bool, power: int, overflows: list[bool], pause: int
) -> None:
    policy = ScalePolicy(
        initial_scale=2.0**power, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    scaler = DynamicLossScaler(policy)
    scales: list[float] = []
    for number, overflow in enumerate(overflows):
        if number == pause:
            # Saved and loaded in mid-run: nothing may be forgotten.
            saved = json.loads(json.dumps(scaler.state_dict()))
            scaler = DynamicLossScaler(policy)
            scaler.load_state_dict(saved)
        try:
            scaler.update(overflow=overflow)
        except LossScaleError:
            scales.append(float("inf"))
            break
        scales.append(scaler.scale)
    assert scales == reference(policy, overflows)


def test_scale_moves_as_deepspeeds() -> None:
    # The scales of DeepSpeed 0.19.8's scaler for this run (window 3, hysteresis 2, first scale 2^4).
    overflows = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    wanted = [
        16.0,
        16.0,
        16.0,
        32.0,
        32.0,
        32.0,
        16.0,
        8.0,
        8.0,
        8.0,
        8.0,
        16.0,
        16.0,
        16.0,
        8.0,
        8.0,
        8.0,
        8.0,
        16.0,
        16.0,
        16.0,
        32.0,
    ]
    scaler = DynamicLossScaler(ScalePolicy(initial_scale=2.0**4, window=3))
    scales = []
    for overflow in overflows:
        scaler.update(overflow=bool(overflow))
        scales.append(scaler.scale)
    assert scales == wanted


def test_c08_ten_overflows_from_a_huge_scale_then_the_least_is_an_error() -> None:
    scaler = DynamicLossScaler(ScalePolicy(initial_scale=2.0**10, hysteresis=1))
    for power in range(9, -1, -1):
        scaler.update(overflow=True)
        assert scaler.scale == 2.0**power
    with pytest.raises(LossScaleError, match=r"overflow at the least loss scale 1 .*min_loss_scale"):
        scaler.update(overflow=True)
    assert scaler.scale == 1.0


def test_the_scale_stays_finite() -> None:
    policy = ScalePolicy(window=1)
    scaler = DynamicLossScaler(policy)
    state = scaler.state
    for _ in range(200):
        state = advance(state, policy, overflow=False)
    assert state.scale == 2.0**126


def test_static_scale_does_not_move() -> None:
    scaler = StaticLossScaler(128)
    scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.scale == 128.0
    scaler.load_state_dict(StaticLossScaler(64).state_dict())
    assert scaler.scale == 128.0
    with pytest.raises(ValueError, match="state of a 'dynamic' loss scaler, and the config asks for a static one"):
        scaler.load_state_dict(DynamicLossScaler().state_dict())


@pytest.mark.parametrize("bad", [{"window": 0}, {"hysteresis": 0}, {"min_scale": 0.0}, {"min_scale": 2.0**20}])
def test_nonsense_policy_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="want"):
        ScalePolicy(**bad)  # type: ignore[arg-type]

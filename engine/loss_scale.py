"""The loss scale of fp16: a state machine whose only input is whether a step overflowed.

It starts at 2^initial_scale_power. `hysteresis` overflows halve it, `window` good steps in a row double it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_LARGEST = 2.0**126
"""A step without gradients never overflows; the scale must stay a finite fp32 all the same."""


class LossScaleError(ArithmeticError):
    """Gradients overflow at the least loss scale: training has diverged."""


@dataclass(frozen=True, kw_only=True)
class ScalePolicy:
    """How the scale moves. `window` and `hysteresis` count optimizer steps."""

    initial_scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    """Refill the hysteresis at every good step instead of only when the scale doubles."""
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(f"want window and hysteresis of at least 1, got {self.window} and {self.hysteresis}")
        if not 0 < self.min_scale <= self.initial_scale <= _LARGEST:
            raise ValueError(
                f"want 0 < min_scale <= initial_scale <= 2^126, got {self.min_scale} and {self.initial_scale}"
            )


@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """Where the scale stands."""

    scale: float
    good_steps: int = 0
    """Steps since the last overflow."""
    hysteresis_left: int
    """Overflows until the scale is halved."""


def advance(state: ScaleState, policy: ScalePolicy, *, overflow: bool) -> ScaleState:
    """The state after one step. Raises LossScaleError when the scale would have to fall below the least."""
    if not overflow:
        # As in DeepSpeed, the step that doubles comes after a full window of good ones.
        doubles = state.good_steps > 0 and state.good_steps % policy.window == 0
        refills = doubles or policy.consecutive_hysteresis
        return ScaleState(
            scale=min(state.scale * 2, _LARGEST) if doubles else state.scale,
            good_steps=state.good_steps + 1,
            hysteresis_left=policy.hysteresis if refills else state.hysteresis_left,
        )
    if state.hysteresis_left > 1:
        return dataclasses.replace(state, good_steps=0, hysteresis_left=state.hysteresis_left - 1)
    if state.scale <= policy.min_scale:
        raise LossScaleError(
            f"gradients overflow at the least loss scale {policy.min_scale:g} (fp16.min_loss_scale): "
            "the loss or the weights are not finite or too large for fp16; lower the learning rate, or train in bf16"
        )
    return dataclasses.replace(state, scale=max(state.scale / 2, policy.min_scale), good_steps=0)


class LossScaler(Protocol):
    """What the engine asks of a loss scaler."""

    @property
    def scale(self) -> float:
        """The loss is multiplied by this, gradients are divided by it."""

    def update(self, *, overflow: bool) -> None:
        """Tell how the step went; a step with overflow was skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


class DynamicLossScaler:
    """A scale that follows the gradients."""

    def __init__(self, policy: ScalePolicy | None = None) -> None:
        self.policy = policy or ScalePolicy()
        self.state = ScaleState(scale=self.policy.initial_scale, hysteresis_left=self.policy.hysteresis)

    @property
    def scale(self) -> float:
        """The loss is multiplied by this, gradients are divided by it."""
        return self.state.scale

    def update(self, *, overflow: bool) -> None:
        """Tell how the step went. Raises LossScaleError at the least scale; the state is then unchanged."""
        self.state = advance(self.state, self.policy, overflow=overflow)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the state, not the policy."""
        return {"kind": "dynamic", **dataclasses.asdict(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` under this object's own policy. Raises ValueError for another kind's state."""
        _check_kind(state, "dynamic")
        self.state = ScaleState(
            scale=float(state["scale"]),
            good_steps=int(state["good_steps"]),
            hysteresis_left=min(int(state["hysteresis_left"]), self.policy.hysteresis),
        )


class StaticLossScaler:
    """A fixed scale; overflows skip the step and change nothing. Scale 1 serves bf16 and fp32."""

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale <= _LARGEST:
            raise ValueError(f"want a loss scale above 0 and at most 2^126, got {scale!r}")
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        """The loss is multiplied by this, gradients are divided by it."""
        return self._scale

    def update(self, *, overflow: bool) -> None:
        """Nothing follows from how the step went."""
        del overflow

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The scale is the config's, so nothing is taken. Raises ValueError for another kind's state."""
        _check_kind(state, "static")


def _check_kind(state: Mapping[str, Any], wanted: str) -> None:
    if state.get("kind") != wanted:
        raise ValueError(
            f"this is the state of a {state.get('kind')!r} loss scaler, and the config asks for a {wanted} "
            "one: set fp16.loss_scale as it was when the state was saved"
        )

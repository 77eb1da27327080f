"""Learning-rate schedules with DeepSpeed's names, parameters and formulas, and torch's scheduler interface.

[Note: what a schedule counts]
`rates(step)` is the rate of the optimizer step that follows `step` completed ones, so the first optimizer step
uses `rates(0)`, the schedule's first value, which is set as soon as the schedule is made. `step()` is called once
after each optimizer step that was taken; a skipped one does not count. (DeepSpeed uses the first value of the
warm-up schedules twice, and so runs one step behind.)

[Note: param groups keep their ratios]
A rate may be a list with one number per param group. A single number is the rate of the groups that have the
optimizer's default rate (where none has it, of the fastest group); the others keep their ratio to it, and a
group with rate 0 stays at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

Rate = float | Sequence[float]
WarmupType = Literal["log", "linear"]

_MOMENTUM_LIMIT = 0.9999
"""DeepSpeed's momentum decay grows past 1, where Adam diverges; it is held here."""


class HasParamGroups(Protocol):
    """An optimizer, as far as a schedule is concerned."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def warmup_fraction(step: int, warmup_steps: int, warmup_type: WarmupType) -> float:
    """How far a warm-up of 0 or at least 2 steps is after `step` steps, 0 to 1."""
    if step >= warmup_steps:
        return 1.0
    return math.log(step + 1) / math.log(warmup_steps) if warmup_type == "log" else step / warmup_steps


def linear_fraction(step: int, warmup_steps: int, total_steps: int) -> float:
    """What is left of a linear fall from 1 at the end of the warm-up to 0 at `total_steps`."""
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def cosine_fraction(step: int, warmup_steps: int, total_steps: int) -> float:
    """What is left of a cosine fall from 1 just before the end of the warm-up to 0 at the last step."""
    progress = (step - warmup_steps + 1) / max(1, total_steps - warmup_steps)
    return (1 + math.cos(math.pi * min(1.0, progress))) / 2


def stairs(fraction: float, count: int) -> float:
    """`fraction` rounded down to one of `count` stairs; 0 stairs leave it smooth."""
    # Sums such as 3 * (1 / 3) may fall short of the stair that they stand on.
    return math.floor(fraction * count + 1e-9) / count if count else fraction


class Schedule:
    """The state and the torch interface; a subclass says what the rates are.

    Raises ValueError for parameters that do not fit together or do not fit the param groups.
    """

    name: ClassVar[str]

    def __init__(self, optimizer: HasParamGroups) -> None:
        self.optimizer = optimizer
        self.last_epoch = 0
        """Optimizer steps taken so far (torch's name for it)."""
        # As torch does: a second schedule on one optimizer starts from the groups' own rates, too.
        self.base_lrs: tuple[float, ...] = tuple(
            float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups
        )

    def rates(self, step: int) -> tuple[float, ...]:
        """The rate of each param group for the optimizer step after `step` completed ones. Pure."""
        raise NotImplementedError

    def momentum(self, step: int) -> float | None:
        """The momentum likewise, or None when the schedule leaves it alone. Pure."""
        del step
        return None

    def rate(self, step: int) -> float:
        """The first group's rate."""
        return self.rates(step)[0]

    def step(self, step: int | None = None) -> None:
        """Count one optimizer step that was taken, or go to `step`, and set the rates of the next."""
        if step is not None and step < 0:
            raise ValueError(f"a schedule cannot go to step {step}: want at least 0")
        self.last_epoch = self.last_epoch + 1 if step is None else step
        self.apply()

    def apply(self) -> None:
        """Set the rates (and momentum) of the coming optimizer step in the optimizer's param groups."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise ValueError(
                f"{self.name} was made for {len(self.base_lrs)} param groups, and the optimizer has "
                f"{len(groups)}: make the schedule after the last add_param_group()"
            )
        momentum = self.momentum(self.last_epoch)
        for group, rate in zip(groups, self.rates(self.last_epoch), strict=True):
            group["lr"] = rate
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif momentum is not None and "momentum" in group:
                group["momentum"] = momentum

    def get_last_lr(self) -> list[float]:
        """The rate of each param group for the coming optimizer step."""
        return list(self.rates(self.last_epoch))

    def get_lr(self) -> list[float]:
        """The same; DeepSpeed's name."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the schedule's name, its position and the groups' own rates."""
        return {"schedule": self.name, "last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the rates are set in the param groups at once.

        The schedule's parameters are this object's own. Raises ValueError for the state of another schedule or
        of another number of param groups.
        """
        if state.get("schedule") != self.name:
            raise ValueError(f"this is the state of {state.get('schedule')!r}, and the schedule is {self.name}")
        if len(state["base_lrs"]) != len(self.base_lrs):
            raise ValueError(
                f"this state has {len(state['base_lrs'])} param groups, and the optimizer has {len(self.base_lrs)}"
            )
        self.last_epoch = int(state["last_epoch"])
        self.base_lrs = tuple(float(rate) for rate in state["base_lrs"])
        self.rebase()
        self.apply()

    def rebase(self) -> None:
        """Derive what depends on `base_lrs` anew. For subclasses."""

    def per_group(self, key: str, value: Rate) -> tuple[float, ...]:
        """One rate per param group. See [Note: param groups keep their ratios]."""
        if not isinstance(value, int | float):
            if len(value) != len(self.base_lrs):
                raise ValueError(
                    f"{self.name}: {key} lists {len(value)} rates, and the optimizer has "
                    f"{len(self.base_lrs)} param groups"
                )
            return tuple(float(rate) for rate in value)
        fastest = max(self.base_lrs)
        default = getattr(self.optimizer, "defaults", {}).get("lr")
        reference = float(default) if default in self.base_lrs else fastest
        if reference <= 0 or all(rate == fastest for rate in self.base_lrs):
            return (float(value),) * len(self.base_lrs)
        return tuple(float(value) * (rate / reference) for rate in self.base_lrs)


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (default: the groups' own rates), then constant."""

    name = "WarmupLR"

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
    ) -> None:
        super().__init__(optimizer)
        self.warmup_num_steps = _warmup_length(self.name, warmup_num_steps, warmup_type)
        self.warmup_type: WarmupType = warmup_type
        self._given = (warmup_min_lr, warmup_max_lr)
        self.rebase()
        self.apply()

    def rebase(self) -> None:
        least, peak = self._given
        self._min = self.per_group("warmup_min_lr", least)
        self._max = self.base_lrs if peak is None else self.per_group("warmup_max_lr", peak)

    def fraction(self, step: int) -> float:
        """0 at the least rate, 1 at the peak."""
        return warmup_fraction(step, self.warmup_num_steps, self.warmup_type)

    def rates(self, step: int) -> tuple[float, ...]:
        fraction = self.fraction(step)
        return tuple(least + (peak - least) * fraction for least, peak in zip(self._min, self._max, strict=True))


class WarmupDecayLR(WarmupLR):
    """The same, and then a linear fall to `warmup_min_lr` at `total_num_steps`."""

    name = "WarmupDecayLR"

    def __init__(self, optimizer: HasParamGroups, *, total_num_steps: int, **warmup: Any) -> None:
        self.total_num_steps = _positive(self.name, "total_num_steps", total_num_steps)
        super().__init__(optimizer, **warmup)

    def fraction(self, step: int) -> float:
        if step < self.warmup_num_steps:
            return super().fraction(step)
        return linear_fraction(step, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(Schedule):
    """Ratios of the groups' own rates: from `warmup_min_ratio` to 1, then as a cosine to `cos_min_ratio`."""

    name = "WarmupCosineLR"

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
    ) -> None:
        super().__init__(optimizer)
        self.total_num_steps = _positive(self.name, "total_num_steps", total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_length(self.name, warmup_num_steps, warmup_type)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type: WarmupType = warmup_type
        self.apply()

    def ratio(self, step: int) -> float:
        """Of the groups' own rates."""
        if step < self.warmup_num_steps:
            fraction = warmup_fraction(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * fraction
        left = cosine_fraction(step, self.warmup_num_steps, self.total_num_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * left

    def rates(self, step: int) -> tuple[float, ...]:
        ratio = self.ratio(step)
        return tuple(rate * ratio for rate in self.base_lrs)


class OneCycle(Schedule):
    """Rate from `cycle_min_lr` to `cycle_max_lr` and back, momentum the other way round, then a decay."""

    name = "OneCycle"

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        super().__init__(optimizer)
        up = _positive(self.name, "cycle_first_step_size", cycle_first_step_size)
        down = up if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = (up, _positive(self.name, "cycle_second_step_size", down))
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._stairs = (cycle_first_stair_count, second_stairs)
        self._decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        self._momenta = (cycle_min_mom, cycle_max_mom) if cycle_momentum else None
        self._given = (cycle_min_lr, cycle_max_lr)
        self.rebase()
        self.apply()

    def rebase(self) -> None:
        self._min = self.per_group("cycle_min_lr", self._given[0])
        self._max = self.per_group("cycle_max_lr", self._given[1])

    def height(self, step: int) -> float:
        """Where the cycle stands: 0 at its ends, 1 at its peak; 0 after it."""
        up, down = self._sizes
        if step <= up:
            return stairs(step / up, self._stairs[0])
        return stairs(max(0.0, (up + down - step) / down), self._stairs[1])

    def decayed(self, step: int) -> float:
        """Units of decay since the end of the cycle."""
        after, size = step - sum(self._sizes), self._decay[0]
        return after / size if after > 0 and size else 0.0

    def rates(self, step: int) -> tuple[float, ...]:
        height, divisor = self.height(step), 1 + self._decay[1] * self.decayed(step)
        return tuple(
            (least + (peak - least) * height) / divisor for least, peak in zip(self._min, self._max, strict=True)
        )

    def momentum(self, step: int) -> float | None:
        if self._momenta is None:
            return None
        least, most = self._momenta
        value = (most - (most - least) * self.height(step)) * (1 + self._decay[2] * self.decayed(step))
        return min(value, max(most, _MOMENTUM_LIMIT))


class LRRangeTest(Schedule):
    """From `lr_range_test_min_lr` on, `step_rate` times it more every `step_size` steps, without end."""

    name = "LRRangeTest"

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._size = _positive(self.name, "lr_range_test_step_size", lr_range_test_step_size)
        self._growth = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        self._given = lr_range_test_min_lr
        self.rebase()
        self.apply()

    def rebase(self) -> None:
        self._min = self.per_group("lr_range_test_min_lr", self._given)

    def rates(self, step: int) -> tuple[float, ...]:
        intervals = step // self._size if self._staircase else step / self._size
        return tuple(least * (1 + self._growth * intervals) for least in self._min)


SCHEDULES: Mapping[str, type[Schedule]] = {
    schedule.name: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_schedule(name: str, params: Mapping[str, Any], optimizer: HasParamGroups) -> Schedule:
    """The schedule of a config's `scheduler` block: `name` is its type, `params` its parameters.

    Raises ValueError for a name that is not known.
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise ValueError(f"no schedule {name!r}: want one of {', '.join(SCHEDULES)}")
    return schedule(optimizer, **params)


def _warmup_length(name: str, steps: int, warmup_type: str) -> int:
    """Steps of the warm-up as the formulas take them: 0, or at least 2."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{name}: want warmup_num_steps of at least 0, got {steps!r}")
    if warmup_type not in ("log", "linear"):
        raise ValueError(f'{name}: want warmup_type "log" or "linear", got {warmup_type!r}')
    # log(1) is 0, so a warm-up of 1 step counts as 2, as in DeepSpeed.
    return max(2, steps) if steps else 0


def _positive(name: str, key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: want {key} of at least 1, got {value!r}")
    return value

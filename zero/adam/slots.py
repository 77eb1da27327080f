"""What CPUAdam keeps from step to step: each parameter's update, filled in once and then only looked at.

[Note: Slots] Filling in an update costs some 15 us of Python, a thousand small parameters' worth of it more than their
arithmetic. So an update stays in the batch, and a step only compares what it was made of with what is there now:
addresses, sizes, layouts and dtypes, and that the state's tensors are the same ones. Whatever differs is filled in
again. The step counts are raised by the kernel itself.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from lamina.zero.adam.dtypes import KERNEL_DTYPE
from lamina.zero.adam.state import MASTER_KEY, check_grad, dense_pair, lay_out_state, start_state
from lamina.zero.adam.update import AdamBatch, AdamHyper, AdamPlanes, AdamScalars


class _Cohort:
    """Parameters of a group that have done equally many steps: they share their scalars."""

    def __init__(self, step: int) -> None:
        self.step = step  # the next one, counted from 1
        self.members = 0
        self.scalars = AdamScalars(AdamHyper(lr=0.0, step=step))  # formed anew before each step


class _Slot:
    """One parameter's place in the batch, and what was true of it when that was filled in."""

    __slots__ = (
        "active",
        "cohort",
        "copy",
        "grad_address",
        "grad_dtype",
        "held_grad",
        "index",
        "numel",
        "param",
        "param_address",
        "state",
        "state_planes",
        "where",
    )

    def __init__(self, param: torch.Tensor, index: int, where: tuple[int, int]) -> None:
        self.param = param
        self.index = index
        self.where = where
        self.active = False  # its update is in the batch
        self.copy: torch.Tensor | None = None  # updated instead of a parameter that is not dense in memory
        self.held_grad: torch.Tensor | None = None  # a copy of the gradient, kept while the kernel reads it
        self.cohort: _Cohort | None = None
        self.numel = self.param_address = self.grad_address = 0
        self.grad_dtype = torch.float32
        self.state: dict[str, Any] = {}
        self.state_planes: list[tuple[str, torch.Tensor, int]] = []

    def fits(self, grad: torch.Tensor, state: Mapping[str, Any] | None) -> bool:
        """Whether the update in the batch is still right, but for the gradient's address."""
        param = self.param
        if not (
            self.active
            and state is self.state
            and param.data_ptr() == self.param_address
            and param.numel() == self.numel
            and param.is_contiguous()
            and grad.layout is torch.strided
            and grad.dtype is self.grad_dtype
            and grad.numel() == self.numel
            and grad.is_cpu
            and grad.is_contiguous()
            and not grad.is_neg()
        ):
            return False
        for key, tensor, address in self.state_planes:
            if state.get(key) is not tensor or tensor.data_ptr() != address:
                return False
        return True


class AdamSlots:
    """The updates of all param groups. In each step: look(), set_scalars(), Kernels.adam_batch(batch), finish()."""

    def __init__(self) -> None:
        self.batch = AdamBatch()
        self._slots: list[_Slot] = []
        self._params: list[list[torch.Tensor]] = []  # of each group
        self._cohorts: list[dict[int, _Cohort]] = []  # of each group, by the next step

    def look(self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Takes up gradients that are there, and states that are not. Raises RuntimeError and TypeError for a gradient
        that cannot be used, before anything is changed."""
        if not self._follows(groups):
            self._follow(groups)
        stale = []
        for slot in self._slots:
            grad = slot.param.grad
            if grad is None:
                if slot.active:
                    self._rest(slot)
            elif not slot.fits(grad, states.get(slot.param)):
                check_grad(*slot.where, slot.param, grad)
                stale.append((slot, grad))
            elif (address := grad.data_ptr()) != slot.grad_address:
                if address % grad.element_size():
                    stale.append((slot, grad))
                else:
                    self.batch.set_grad(slot.index, address)
                    slot.grad_address = address
        for slot, grad in stale:
            self._fill(slot, grad, states[slot.param])

    def set_scalars(self, options: Sequence[Mapping[str, Any]], grad_multiplier: float) -> None:
        """Forms the scalars of every group's next step from its options (AdamHyper's fields without the step)."""
        self._set_scalars(options, grad_multiplier)
        if not self.batch.counters_agree():  # somebody set a step count
            for slot in self._slots:
                if slot.active:
                    self._join(slot)
            self._set_scalars(options, grad_multiplier)

    def _set_scalars(self, options: Sequence[Mapping[str, Any]], grad_multiplier: float) -> None:
        for cohorts, own in zip(self._cohorts, options, strict=True):
            for cohort in cohorts.values():
                cohort.scalars.form(grad_multiplier, step=cohort.step, **own)

    def finish(self) -> None:
        """After the kernel: copies go home, and autograd is told what was written."""
        written = []
        for slot in self._slots:
            if not slot.active:
                continue
            if slot.copy is not None:
                with torch.no_grad():
                    slot.param.copy_(slot.copy)
            else:
                written.append(slot.param)
            if slot.copy is not None or slot.held_grad is not None:
                self._rest(slot)
        if written:
            increment_version(written)
        for index, cohorts in enumerate(self._cohorts):
            for cohort in cohorts.values():
                cohort.step += 1
            self._cohorts[index] = {cohort.step: cohort for cohort in cohorts.values() if cohort.members}

    def _follows(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        if len(groups) != len(self._params):
            return False
        for own, group in zip(self._params, groups, strict=True):
            params = group["params"]
            if len(own) != len(params) or not all(map(is_, own, params)):
                return False
        return True

    def _follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Begins anew with the parameters that the groups have now."""
        self.batch.clear()
        self._params = [list(group["params"]) for group in groups]
        self._cohorts = [{} for _ in groups]
        self._slots = [
            _Slot(param, self.batch.reserve(), (g, i))
            for g, params in enumerate(self._params)
            for i, param in enumerate(params)
        ]

    def _rest(self, slot: _Slot) -> None:
        self.batch.rest(slot.index)
        slot.active = False
        slot.copy = slot.held_grad = None
        if slot.cohort is not None:
            slot.cohort.members -= 1
            slot.cohort = None

    @torch.no_grad()
    def _fill(self, slot: _Slot, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if slot.active:
            self._rest(slot)
        param = slot.param
        start_state(param, state)
        target, dense_grad = dense_pair(param, grad)
        master_key = MASTER_KEY.get(param.dtype)
        lay_out_state(target, state, master_key)
        keys = (
            ("exp_avg", "exp_avg_sq", "step") if master_key is None else ("exp_avg", "exp_avg_sq", "step", master_key)
        )
        addresses = {key: state[key].data_ptr() for key in keys}
        planes = AdamPlanes(
            n=param.numel(),
            param=target.data_ptr(),
            param_dtype=KERNEL_DTYPE[param.dtype],
            grad=dense_grad.data_ptr(),
            grad_dtype=KERNEL_DTYPE[grad.dtype],
            exp_avg=addresses["exp_avg"],
            exp_avg_sq=addresses["exp_avg_sq"],
            master=addresses.get("master", 0),
            remainder=addresses.get("remainder", 0),
            adopt_param=True,
            counter=addresses["step"],
        )
        slot.param_address, slot.numel = planes.param, planes.n
        slot.grad_address, slot.grad_dtype = planes.grad, grad.dtype
        slot.state, slot.state_planes = state, [(key, state[key], addresses[key]) for key in keys]
        slot.copy = None if target is param else target
        slot.held_grad = None if dense_grad is grad else dense_grad
        slot.active = True
        self._join(slot, planes)

    def _join(self, slot: _Slot, planes: AdamPlanes | None = None) -> None:
        """Puts the slot among those of its group that have done as many steps; planes: and its update into the batch."""
        if slot.cohort is not None:
            slot.cohort.members -= 1
        step = int(slot.state["step"]) + 1
        cohorts = self._cohorts[slot.where[0]]
        if step not in cohorts:
            cohorts[step] = _Cohort(step)
        slot.cohort = cohorts[step]
        slot.cohort.members += 1
        if planes is not None:
            self.batch.put(slot.index, planes, slot.cohort.scalars)
        else:
            self.batch.set_scalars(slot.index, slot.cohort.scalars)

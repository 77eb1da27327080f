"""Any optimizer of torch over state in memory: it runs as it is, on fp32 masters of this rank's parameters.

In fp32 on one rank, without an accelerator, the masters are the module's own parameters. Else they are views of the
master plane (several ranks: 1-d, this rank's part), and the parameters that compute uses are rounded from them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.tiers import Plane
from lamina.zero.adam.kernels import Kernels
from lamina.zero.gradients.norm import GradientNorm, clip_factor
from lamina.zero.gradients.plane import GradientPlane
from lamina.zero.gradients.planes import Gradients
from lamina.zero.groups.segment import Segment
from lamina.zero.groups.shard_planes import plane_in_memory, planes_in_memory
from lamina.zero.ranks.collectives import Ranks

from .optimizer import Copies, StepOutcome


@dataclass(frozen=True, eq=False)
class _Master:
    """One parameter's master: elements [first, last) of this rank's shard."""

    name: str
    segment: Segment
    index: int
    first: int
    last: int
    tensor: nn.Parameter


@dataclass(frozen=True, kw_only=True)
class MasterSlice:
    """Elements [first, last) of a parameter, which this rank's optimizer sees in a tensor of ``shape``."""

    name: str
    first: int
    last: int
    shape: torch.Size


class ClientOptimizer:
    """What the engine asks of an optimizer, done by one of torch. Its state is memory of its own; see [Note: own state]."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        segments: Sequence[Segment],
        gradients: Gradients,
        kernels: Kernels,
        ranks: Ranks,
        clip_norm: float,
    ) -> None:
        """Puts the masters into the optimizer's param groups (the group objects stay) and moves its state to them."""
        self.optimizer = optimizer
        self.outcome = StepOutcome(grad_norm=0.0, grad_multiplier=1.0, redone=0)
        self.clip_norm = clip_norm
        self.param_steps: dict[int, int] = {}  # torch's optimizers count in their own state
        self.generation_meta: Callable[[], Mapping[str, object]] = dict
        self.updating = False
        self.copies: Copies | None = None
        self._segments = [segment for segment in segments if segment.trainable]
        self._gradients = gradients
        self._norm = GradientNorm(self._segments, gradients, kernels, ranks)
        self._ranks = ranks
        self._masters = self._make_masters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own group objects."""
        return self.optimizer.param_groups

    def _make_masters(self) -> list[_Master]:
        places = {
            id(parameter): (segment, index)
            for segment in self._segments
            for index, parameter in enumerate(segment.parameters)
        }
        masters = []
        for group in self.optimizer.param_groups:
            replaced = []
            for parameter in group["params"]:
                if id(parameter) not in places:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the module does not train"
                    )
                master = self._master_of(parameter, *places[id(parameter)])
                if master is not None:
                    masters.append(master)
                    self._move_state(parameter, master)
                    replaced.append(master.tensor)
            group["params"] = replaced
        return masters

    def _master_of(self, parameter: nn.Parameter, segment: Segment, index: int) -> _Master | None:
        """None where other ranks have all of the parameter."""
        pieces = {slot: (first, last) for slot, first, last in segment.layout.pieces(segment.rank)}
        first, last = pieces.get(index, (0, 0))
        slot = segment.layout.slots[index]
        whole = segment.layout.world_size == 1
        if first == last and not whole:
            return None
        itself = segment.dtype is torch.float32 and whole and segment.in_place and segment.device is None
        if itself:
            return _Master(slot.name, segment, index, first, last, parameter)
        plane = Plane.PARAM if segment.dtype is torch.float32 else Plane.MASTER
        memory = plane_in_memory(segment, plane)
        if memory is None:
            raise RuntimeError(f"{slot.name} has no {plane} in memory for the optimizer to work on")
        values = memory[first:last]
        return _Master(
            slot.name, segment, index, first, last, nn.Parameter(values.view(slot.shape) if whole else values)
        )

    def _move_state(self, parameter: nn.Parameter, master: _Master) -> None:
        """Some optimizers make their state when they are made."""
        if parameter is master.tensor or parameter not in self.optimizer.state:
            return
        state = self.optimizer.state.pop(parameter)
        begin = master.segment.layout.shard_range(master.segment.rank)[0]
        slot = master.segment.layout.slots[master.index]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == slot.shape and value.dim():
                part = value.reshape(-1)[begin + master.first - slot.offset : begin + master.last - slot.offset]
                state[key] = part.float().clone().view(master.tensor.shape)
        self.optimizer.state[master.tensor] = state

    # -- the step ------------------------------------------------------------------------------------------------------

    def started_early(self, segment: Segment) -> bool:
        del segment
        return False

    def start_early(self, segment: Segment, *, copy_in_use: bool = False) -> None:
        del copy_in_use
        raise RuntimeError(f"{segment.name}: updates of a client's optimizer do not start early")

    def settle(self) -> None:
        """Nothing is under way."""

    def discard(self) -> None:
        """Forget the gradients of this window: nothing has happened."""
        self._gradients.release_all()

    @torch.no_grad()
    def finish(self, *, step: int, grad_scale: float = 1.0, skip_nonfinite: bool = False) -> None:
        """See TieredAdam.finish. Raises what the optimizer's ``step`` raises."""
        del step
        began = time.perf_counter()
        norm = self._norm.value() / grad_scale
        if skip_nonfinite and not math.isfinite(norm):
            self.discard()
            self.outcome = StepOutcome(grad_norm=norm, grad_multiplier=1.0, redone=0, skipped=True)
            return
        multiplier = clip_factor(norm, self.clip_norm) / grad_scale
        if self.copies is not None:
            self.copies.committed({segment.group for segment in self._segments if not segment.in_place}, frozenset())
        try:
            for master in self._masters:
                master.tensor.grad = self._gradient(master, multiplier)
            with torch.enable_grad():
                self.optimizer.step()
            for master in self._masters:
                if master.tensor.grad is not None:
                    self._round(master)
        finally:
            for master in self._masters:
                master.tensor.grad = None
            self._gradients.release_all()
        for segment in self._segments:
            if segment.replicated and segment.layout.world_size > 1 and segment.flat is not None:
                self._ranks.all_gather(segment.flat)
        self.outcome = StepOutcome(
            grad_norm=norm, grad_multiplier=multiplier, redone=0, update_s=time.perf_counter() - began
        )

    def _gradient(self, master: _Master, multiplier: float) -> torch.Tensor | None:
        plane: GradientPlane = self._gradients[master.segment]
        if master.index not in plane.arrived:
            return None
        values = plane.piece(master.index).float()
        # In place: the plane is given back after the step, and a copy would be memory that no budget has.
        return (values if multiplier == 1.0 else values.mul_(multiplier)).view(master.tensor.shape)

    @staticmethod
    def _round(master: _Master) -> None:
        """Bring the new master into every copy of the parameter."""
        flat = master.tensor.detach().reshape(-1)
        for memory in planes_in_memory(master.segment, Plane.PARAM):
            into = memory[master.first : master.last]
            if into.data_ptr() != flat.data_ptr():
                into.copy_(flat)

    def master_slices(self) -> list[MasterSlice]:
        """What this rank updates."""
        found = []
        for master in self._masters:
            slot = master.segment.layout.slots[master.index]
            begin = master.segment.layout.shard_range(master.segment.rank)[0] - slot.offset
            found.append(
                MasterSlice(
                    name=master.name, first=begin + master.first, last=begin + master.last, shape=master.tensor.shape
                )
            )
        return found

    # -- its state, for checkpoints ------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """The optimizer's tensors by parameter and key, not copies."""
        return {
            (master.name, key): value
            for master in self._masters
            for key, value in self.optimizer.state.get(master.tensor, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def state_values(self) -> dict[str, dict[str, Any]]:
        """What it keeps besides tensors."""
        return {
            master.name: {
                key: value
                for key, value in self.optimizer.state.get(master.tensor, {}).items()
                if not isinstance(value, torch.Tensor)
            }
            for master in self._masters
        }

    def check_state(self, lengths: Mapping[tuple[str, str], int]) -> None:
        """Raise ValueError for tensors, by parameter and key, that cannot be those of a master of this rank."""
        masters = {master.name: master for master in self._masters}
        for (name, key), numel in lengths.items():
            if name in masters and numel != 1 and numel not in _fitting(masters[name]):
                raise ValueError(
                    f"{key} of {name} has {numel} elements in the checkpoint: a client's optimizer resumes at the world size "
                    f"and stage it was saved at. Load with load_optimizer_states=False to start it anew"
                )

    def load_state(
        self, tensors: Mapping[tuple[str, str], torch.Tensor], values: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Replace the state."""
        for master in self._masters:
            state: dict[str, Any] = dict(values.get(master.name, {}))
            state |= {key: tensor.clone() for (name, key), tensor in tensors.items() if name == master.name}
            if state:
                self.optimizer.state[master.tensor] = state
            else:
                self.optimizer.state.pop(master.tensor, None)


def _fitting(master: _Master) -> set[int]:
    """Lengths that an optimizer's tensor for the master may have: the master's, or a row's or column's (factored ones)."""
    shape = master.tensor.shape
    return (
        {master.tensor.numel(), *shape}
        | {math.prod(shape[:i]) for i in range(len(shape) + 1)}
        | {
            math.prod(shape[:-1]),
            math.prod((*shape[:-2], *shape[-1:])),
        }
    )

"""Hooks that fetch groups when they are used and collect gradients as they come: what turns a module into a ZeRO one.

[Note: saved parameters] Autograd saves parameters, and views of them, for the backward pass. While the engine's
forward runs, a saved tensor over a group's memory is packed as a reference (segment, shape, strides, offset), so that the memory
can be given up; unpacking fetches the group again. Everything else is saved as it is.

[Note: not watched] The modes that watch the user's operations (fetch_on_use.py, ahead.py) would see every step that these hooks
take, some ten for each gradient, and cost a small model a tenth of its backward pass: the hooks take them off.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from lamina.tiers import Executor
from lamina.zero.groups.fetch_on_use import FetchOnUse
from lamina.zero.groups.param_group import ParamGroup
from lamina.zero.groups.segment import Segment


class SavedParameter:
    """A parameter (or a view of one) that autograd holds for the backward pass, without its memory."""

    __slots__ = ("offset", "segment", "shape", "state", "strides")

    def __init__(self, state: "ZeroState", segment: Segment, tensor: torch.Tensor) -> None:
        self.state = state
        self.segment = segment
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset()
        state.saved[id(segment)] += 1

    def __del__(self) -> None:
        state: ZeroState | None = getattr(self, "state", None)  # none when a tracer made it without a constructor
        if state is not None:
            state.saved[id(self.segment)] -= 1


@dataclass(frozen=True)
class SavedActivation:
    """Any other saved tensor, with the version it had: a later in-place change would make the gradient wrong."""

    tensor: torch.Tensor
    version: int


class _ModuleUse:
    """Pins a module's groups while its forward runs, also when it calls itself; what failed half-way is let go of."""

    def __init__(self, executor: Executor, groups: Sequence[int]) -> None:
        self._executor = executor
        self._groups = groups
        self._pinned: list[list[int]] = []  # one entry per call under way

    def begin(self, _module: nn.Module, _args: Any) -> None:
        pinned: list[int] = []
        self._pinned.append(pinned)
        for group in self._groups:
            self._executor.pin(group)
            pinned.append(group)

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        for group in self._pinned.pop() if self._pinned else ():
            self._executor.unpin(group)


class ZeroState:
    """Owns the hooks on one module. ``take_gradient`` is called with every gradient (segment, slot, values)."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        executor: Executor,
        take_gradient: Callable[[Segment, int, torch.Tensor], None] | None,
        *,
        bound: dict[int, Segment],
        watch_in_place: bool,
        between_operations: Callable[[], None],
    ) -> None:
        """``bound`` maps addresses to segments and is kept up to date by the groups. ``watch_in_place``: also count how
        often autograd still holds parameters that are at home in memory (they may be updated before the step).
        ``between_operations`` is called in the backward pass, again and again."""
        self.executor = executor
        self.groups = groups
        self.saved: dict[int, int] = {id(s): 0 for group in groups for s in group.segments}
        self.bound = bound
        self._take_gradient = take_gradient
        self._between_operations = between_operations
        self._handles: list[RemovableHandle] = []
        self._module = module
        self.homes_changed(watch_in_place=watch_in_place)

    def homes_changed(self, *, watch_in_place: bool) -> None:
        """Hook the modules for the homes that parameters have now. Not while anything is saved for a backward pass."""
        self.streamed_group_of = {
            id(parameter): group.index
            for group in self.groups
            for segment in group.streamed
            for parameter in segment.parameters
        }
        self._track_saved = watch_in_place or bool(self.streamed_group_of)
        self._refuse_compiled()
        self.remove()
        self._hook_modules(self._module)
        self._hook_gradients()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward (and the backward, where recomputation may run forward again)."""
        self._refuse_compiled()
        with ExitStack() as stack:
            if self._track_saved:
                stack.enter_context(saved_tensors_hooks(self._pack, self.unpack))
            if self.streamed_group_of:
                stack.enter_context(FetchOnUse(self.executor, self.streamed_group_of))
            yield

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse_compiled(self) -> None:
        """A compiler would trace the hooks, and its code would hold on to parameters that are to be given up."""
        if not self.streamed_group_of or "torch._dynamo" not in sys.modules:
            return
        for name, part in self._module.named_modules():
            if part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule":
                raise TypeError(
                    f"{name or 'the module'} is compiled, which is not supported where parameters are fetched for use "
                    f"(stage 3 on several ranks, offloaded parameters). Leave torch.compile out, or keep the parameters in "
                    f"memory: zero_optimization.stage 2 or less, offload_param.device none"
                )

    # -- forward -----------------------------------------------------------------------------------------------------

    def _hook_modules(self, module: nn.Module) -> None:
        """A module with streamed parameters of its own keeps their groups resident while its forward runs."""
        for part in module.modules():
            used = self._groups_of(part)
            if not used:
                continue
            uses = _ModuleUse(self.executor, used)
            self._handles.append(part.register_forward_pre_hook(uses.begin, prepend=True))
            self._handles.append(part.register_forward_hook(uses.end, always_call=True))

    def _groups_of(self, part: nn.Module) -> list[int]:
        """Groups of the streamed parameters that a module has of its own."""
        groups = (self.streamed_group_of.get(id(parameter)) for parameter in part.parameters(recurse=False))
        return sorted({group for group in groups if group is not None})

    @contextmanager
    def pinned(self, part: nn.Module) -> Iterator[None]:
        """A module's own parameters stay resident inside: for a forward that is not called through the module."""
        use = _ModuleUse(self.executor, self._groups_of(part))
        use.begin(part, ())
        try:
            yield
        finally:
            use.end(part, (), None)

    # -- saved tensors: see [Note: saved parameters] -------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in a group's memory."""
        return tensor.untyped_storage().data_ptr() in self.bound

    def reference(self, tensor: torch.Tensor) -> SavedParameter | None:
        """What stands for a tensor over a group's memory; None for any other."""
        segment = self.bound.get(tensor.untyped_storage().data_ptr())
        return SavedParameter(self, segment, tensor) if segment is not None else None

    def _pack(self, tensor: torch.Tensor) -> SavedParameter | SavedActivation:
        with DisableTorchFunction():
            saved = self.reference(tensor)
            if saved is not None:
                return saved
            # Without its history, which autograd puts back: the node of an operation would else keep itself alive by the result
            # that it saved, and the whole graph with it where no backward pass comes.
            return SavedActivation(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def unpack(self, saved: SavedParameter | SavedActivation) -> torch.Tensor:
        """The tensor, its group fetched where need be. Raises RuntimeError when it was changed in place."""
        self._between_operations()
        with DisableTorchFunction():
            return self._unpack(saved)

    def _unpack(self, saved: SavedParameter | SavedActivation) -> torch.Tensor:
        if isinstance(saved, SavedActivation):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(saved.tensor.shape)} that the backward pass needs was changed in place after "
                    f"it was used (version {saved.tensor._version}, wanted {saved.version}): use an out-of-place operation"
                )
            return saved.tensor
        if not saved.segment.in_place:
            self.executor.acquire(saved.segment.group)
        if saved.segment.flat is None:
            raise RuntimeError(f"{saved.segment.name} was acquired but is not bound")
        return saved.segment.flat.as_strided(saved.shape, saved.strides, saved.offset)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _hook_gradients(self) -> None:
        if self._take_gradient is None:
            return
        for group in self.groups:
            for segment in group.segments:
                if not segment.trainable:
                    continue
                for index, parameter in enumerate(segment.parameters):
                    self._handles.append(
                        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                            self._gradient_hook(segment, index)
                        )
                    )

    def _gradient_hook(self, segment: Segment, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            with DisableTorchFunction():
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None and self._take_gradient is not None:
                    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                    self._take_gradient(segment, index, dense)
                    self._between_operations()

        return take

    def drop_gradients(self) -> None:
        """Forget what a backward pass that was cut has left in ``.grad``: the next one would add to it."""
        with DisableTorchFunction():
            for group in self.groups:
                for segment in group.segments:
                    for parameter in segment.parameters if segment.trainable else ():
                        parameter.grad = None

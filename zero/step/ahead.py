"""Refuses to compute with parameters that have the coming step's values already.

[Note: ahead of the step] What autograd holds for a backward pass delays an early update. A block under torch's own checkpoint
holds nothing until it is run again, nor does an operation that needs no parameter for its gradient: when a second loss, or
the user's own backward pass, runs them after the update started, nothing but their use tells. On one rank fetched copies
may be used: one that an update has written into is fetched anew, with the old values. On several ranks they may not; see
[Note: copies on several ranks] in collector.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lamina.zero.groups.fetch_on_use import READING_GETTERS, flatten
from lamina.zero.groups.segment import Segment


class AheadOfStep:
    """Hooks on every module with parameters of ``segments``. Its forward raises RuntimeError once the update of one of them
    was ``started`` and until the step, or until the window is dropped."""

    def __init__(self, module: nn.Module, started: Callable[[Segment], bool]) -> None:
        self._module = module
        self._started = started
        self._handles: list[RemovableHandle] = []
        self._segment_of: dict[int, Segment] = {}

    def watch(self, segments: Sequence[Segment]) -> None:
        """From now on these are the segments that must not be used once their update was started. Called after other hooks
        were set, it comes before them: nothing is fetched for what is refused."""
        self.remove()
        self._segment_of = {id(parameter): segment for segment in segments for parameter in segment.parameters}
        for part in self._module.modules():
            own = dict.fromkeys(self._watched(part.parameters(recurse=False)))
            if own:
                self._handles.append(part.register_forward_pre_hook(self._before(list(own)), prepend=True))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def uses(self) -> "RefuseAhead":
        """A context in which the use of such a parameter outside of its module's forward raises as well."""
        return RefuseAhead(self)

    def refuse(self, values: Iterator[Any]) -> None:
        """Raises RuntimeError where one of the values is a parameter that must not be used any more."""
        self._refuse(self._watched(values))

    def _watched(self, values: Iterator[Any]) -> Iterator[Segment]:
        for value in values:
            if isinstance(value, nn.Parameter) and id(value) in self._segment_of:
                yield self._segment_of[id(value)]

    def _before(self, segments: list[Segment]) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _args: self._refuse(iter(segments))

    def _refuse(self, segments: Iterator[Segment]) -> None:
        for segment in segments:
            if self._started(segment):
                raise RuntimeError(
                    f"{segment.name} is used again before step(), in the backward pass of a second loss of checkpointed blocks "
                    f"say, but was updated under the backward pass: it may have the coming step's values. Write "
                    f"tiers.overlap_update: false; zero_grad() drops this window"
                )


class RefuseAhead(TorchFunctionMode):
    """While active, every torch function is refused that is given a parameter with the coming step's values."""

    def __init__(self, ahead: AheadOfStep) -> None:
        super().__init__()
        self._ahead = ahead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        reads = name != "__set__" and (name != "__get__" or func.__self__.__name__ in READING_GETTERS)
        if reads:
            self._ahead.refuse(flatten((*args, *kwargs.values())))
        return func(*args, **kwargs)

"""Fetches parameters that are used outside their module's forward: ``other.weight * 2``, ``torch.stack(weights)``.

[Note: more than the window] An operation may use parameters of more groups than the window holds. Each is then copied,
one group after the other, and the operation runs on the copies; gradients flow through the copies to the parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from lamina.tiers import BudgetError, Executor

# Properties of a tensor whose value needs its elements; every other getter can be answered from a placeholder.
READING_GETTERS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


class FetchOnUse(TorchFunctionMode):
    """While active, every torch function that is given a streamed parameter has its group resident while it runs.

    ``group_of`` maps the ids of streamed parameters to their groups.
    """

    def __init__(self, executor: Executor, group_of: Mapping[int, int]) -> None:
        super().__init__()
        self._executor = executor
        self._group_of = group_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" or (name == "__get__" and func.__self__.__name__ not in READING_GETTERS):
            return func(*args, **kwargs)
        groups = {
            group
            for value in flatten((*args, *kwargs.values()))
            if isinstance(value, nn.Parameter) and (group := self._group_of.get(id(value))) is not None
        }
        if not groups:
            return func(*args, **kwargs)
        changes = (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        with ExitStack() as pinned:
            try:
                for group in sorted(groups):
                    self._executor.pin(group)
                    pinned.callback(self._executor.unpin, group)
            except BudgetError:
                if len(groups) == 1 or changes:
                    raise
            else:
                return func(*args, **kwargs)
        return func(*self._copied(args), **{key: self._copied(value) for key, value in kwargs.items()})

    def _copied(self, value: Any) -> Any:
        """The value with copies of streamed parameters in their place; see [Note: more than the window]."""
        if isinstance(value, list | tuple):
            copies = [self._copied(inner) for inner in value]
            return copies if type(value) is list else tuple(copies)
        group = self._group_of.get(id(value)) if isinstance(value, nn.Parameter) else None
        if group is None:
            return value
        self._executor.pin(group)
        try:
            return value.clone()
        finally:
            self._executor.unpin(group)


def flatten(values: Sequence[Any]) -> Iterator[Any]:
    """The values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flatten(value)
        else:
            yield value

"""torch's Optimizer without torch's compiler, and without what nobody looks at.

[Note: no compiler] Some of its methods are told to the compiler when they are first called, and for that all of torch._dynamo is
imported: 1.7 s and 75 MB of a process that compiles nothing. The functions below are the same without that; they matter
only to code that is compiled, where an optimizer is not made.

[Note: unwatched steps] torch wraps every step: a range for the profiler, a loop over the hooks. After an update of some MB
the caches hold nothing of Python's, and the wrapping takes 0.1 ms, a tenth of a step over a million parameters. So a step
is wrapped only while there are hooks or a profiler.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

P = ParamSpec("P")
R = TypeVar("R")


class PlainOptimizer(torch.optim.Optimizer):
    """A base class; see [Note: no compiler]."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def hooked_when_watched(step: Callable[P, R]) -> Callable[P, R]:
    """Decorates the step method of a class: hooks and the profiler's range as torch has them; see [Note: unwatched steps].

    A subclass's step that calls this one is wrapped by torch itself, so that its hooks run once."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer = args[0]
        if type(optimizer).step is chosen and _is_watched(optimizer):  # type: ignore[attr-defined, arg-type]
            return wrapped(*args, **kwargs)
        return step(*args, **kwargs)

    chosen.hooked = True  # type: ignore[attr-defined]  # tells torch that it need not wrap
    return chosen


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )

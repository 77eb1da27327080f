"""torch's Optimizer without torch's compiler.

[Note: no compiler] Some of its methods are told to the compiler when they are first called, and for that all of torch._dynamo is
imported: 1.7 s and 75 MB of a process that compiles nothing. The functions below are the same without that; they matter
only to code that is compiled, where an optimizer is not made.
"""

import inspect

import torch


class PlainOptimizer(torch.optim.Optimizer):
    """A base class; see [Note: no compiler]."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

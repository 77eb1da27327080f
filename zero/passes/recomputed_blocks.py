"""Makes the blocks of a module be computed again in the backward pass, without a change to the model.

A hook can look at a call, but not carry it out another way. So each block gets an attribute ``forward`` of its own, which the
one of its class is found behind; ``restore`` takes it off again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .recompute import Recomputer


class _RecomputedForward:
    """Takes the place of one block's forward."""

    def __init__(self, name: str, block: nn.Module, recomputer: Recomputer) -> None:
        self.name = name
        self.block = block
        self.before: Callable[..., Any] | None = vars(block).get("forward")  # somebody else's attribute
        self._forward = self.__wrapped__ = block.forward  # whoever asks for the signature finds the block's own
        self._recomputer = recomputer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recomputer(self.name, self._call, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with self._recomputer.state.pinned(self.block):
            return self._forward(*args, **kwargs)


class RecomputedBlocks:
    """The blocks of a module that are computed again."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], recomputer: Recomputer) -> None:
        self._forwards = [_RecomputedForward(name, block, recomputer) for name, block in blocks]
        for forward in self._forwards:
            forward.block.forward = forward

    def restore(self) -> None:
        """Let the blocks run as before."""
        for forward in self._forwards:
            if vars(forward.block).get("forward") is forward:
                del forward.block.forward
                if forward.before is not None:
                    forward.block.forward = forward.before


def has_running_statistics(block: nn.Module) -> bool:
    """Whether a second run would count its input into running means again: such a block is left as it is."""
    return any(isinstance(part, _BatchNorm) and part.track_running_stats for part in block.modules())

"""Keeps a module from computing with the placeholders that a closed engine leaves: its forward raises instead of giving NaN."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina.zero.access import place_of
from lamina.zero.whole_state_dict import is_placeholder


class _Refusal:
    """A forward pre-hook on one module, which takes itself off once the parameters have values again."""

    def __init__(self, name: str, *, recurse: bool) -> None:
        self.name = name
        self.recurse = recurse
        self.handle: RemovableHandle | None = None

    def __call__(self, part: nn.Module, _args: Any) -> None:
        gone = _gone(part, recurse=self.recurse)
        if not gone:
            self.take_off()
            return
        first = f"{self.name}.{gone[0]}" if self.name else gone[0]
        others = f" and of {len(gone) - 1} others" if len(gone) > 1 else ""
        raise RuntimeError(
            f"forward: the values of {first}{others} are not in memory, and the engine that had them was closed. Compute "
            f"before engine.close(), or keep the weights with engine.save_pretrained(dir) or module.state_dict() before it "
            f"and load them into a newly built model"
        )

    def take_off(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def refuse_forward(module: nn.Module) -> None:
    """Let the forward of a module, and of its parts that hold placeholders, raise RuntimeError until they have values."""
    allow_forward(module)
    if not _gone(module, recurse=True):
        return
    for name, part in module.named_modules():
        whole = part is module  # it may use the parameters of its parts itself
        if whole or _gone(part, recurse=False):
            refusal = _Refusal(name, recurse=whole)
            refusal.handle = part.register_forward_pre_hook(refusal, prepend=True)


def allow_forward(module: nn.Module) -> None:
    """Take back refuse_forward()."""
    for part in module.modules():
        for hook in list(part._forward_pre_hooks.values()):
            if isinstance(hook, _Refusal):
                hook.take_off()


def _gone(part: nn.Module, *, recurse: bool) -> list[str]:
    return [
        name
        for name, parameter in part.named_parameters(recurse=recurse)
        if place_of(parameter) is None and is_placeholder(parameter)
    ]

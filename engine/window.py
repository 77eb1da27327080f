"""The accumulation window: which micro-batch is next, whether its step updates, and by what its loss is multiplied.

[Note: accumulation window]
A window is what one optimizer step sees: `gradient_accumulation_steps` micro-batches, unless the caller sets the boundary.
The gradient is the mean over that many micro-batches: each loss counts 1 / gradient_accumulation_steps, also where the
caller ends a window early or late. A window that is open when an epoch ends stays open: the next micro-batches continue
it, and a checkpoint carries its gradients. To end it early, set the boundary to True before the step; to forget it, call
``engine.zero_grad()``.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class AccumulationWindow:
    """Counts micro-batches. ``micro_steps``: those closed by ``step()`` so far, over the whole training."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.micro_steps = 0
        self.in_window = 0
        """Micro-batches closed since the last boundary."""
        self.forced: bool | None = None
        """What the caller set; None: count."""
        self.is_scaled = False
        """Whether a loss of the current micro-batch went through ``backward()`` or ``scale()``."""
        self.syncs = True
        """False inside ``no_sync()``."""

    @property
    def is_last(self) -> bool:
        """Whether the next ``step()`` updates."""
        if not self.syncs:
            return False
        return self.forced if self.forced is not None else self.in_window + 1 >= self.length

    def close_micro_batch(self) -> bool:
        """Count one micro-batch; whether it ended the window. Raises RuntimeError inside ``no_sync()``."""
        if not self.syncs:
            raise RuntimeError(
                "step() inside no_sync(): call it after the block, for the micro-batch that ends the window"
            )
        last = self.is_last
        self.micro_steps += 1
        self.in_window = 0 if last else self.in_window + 1
        self.is_scaled = False
        return last

    def forget(self) -> None:
        """The window's gradients were dropped: start it over."""
        self.in_window = 0
        self.is_scaled = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate. Raises RuntimeError when nested."""
        if not self.syncs:
            raise RuntimeError("no_sync() inside no_sync()")
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

"""Collects gradients during the backward pass: to this rank's planes, over the other ranks, into early updates."""

from collections.abc import Callable, Sequence

import torch

from .client_optimizer import ClientOptimizer
from .gradients import Gradients
from .optimizer import TieredAdam
from .reducer import Reducer
from .segment import Segment


class GradientCollector:
    """Every gradient passes through ``take``.

    ``early``: the segments whose update may start under the backward pass of a window's last micro-batch; ``still_used``
    tells whether the rest of the backward pass needs a segment's parameters, ``copy_in_use`` whether it needs any of its group's.
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizer: TieredAdam | ClientOptimizer,
        reducer: Reducer | None,
        *,
        early: Sequence[Segment],
        still_used: Callable[[Segment], bool],
        copy_in_use: Callable[[Segment], bool],
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._reducer = reducer
        self.update_early(early)
        self._still_used = still_used
        self._copy_in_use = copy_in_use
        self._waiting: list[Segment] = []
        self._last_of_window = False

    def update_early(self, segments: Sequence[Segment]) -> None:
        """From now on these are the segments whose update may start early."""
        self._early = {id(segment) for segment in segments}

    def begin_backward(self, *, last_of_window: bool) -> None:
        self._last_of_window = last_of_window
        self._gradients.begin_backward()
        if self._reducer is not None:
            self._reducer.begin_backward()

    def take(self, segment: Segment, slot_index: int, gradient: torch.Tensor) -> None:
        """Take over one parameter's gradient, and start the update of what has become final."""
        if self._reducer is not None:
            self._reducer.add(segment, slot_index, gradient)
            return
        plane = self._gradients[segment]
        if self._optimizer.started_early(segment):
            # More came after all parameters had theirs (a weight that is recomputed and used twice): start over.
            if not plane.present:
                raise RuntimeError(
                    f"{segment.layout.slots[slot_index].name} got another gradient (a second loss, or a weight that is used "
                    f"again) after its group was updated under the backward pass and its gradient given up, since "
                    f"tiers.host_bytes is short. Write tiers.overlap_update: false; zero_grad() drops this window"
                )
            plane.edited = True
            plane.add(slot_index, gradient)
            return
        self._gradients.add(segment, slot_index, gradient)
        if self._last_of_window and id(segment) in self._early:
            if plane.final:
                self._waiting.append(segment)
            self._start_final()

    def end_backward(self) -> None:
        """The backward pass is over, whether it succeeded or not."""
        self._waiting.clear()
        self._last_of_window = False

    def reduce_rest(self) -> None:
        """After a successful backward pass: bring what is left together over the ranks."""
        if self._reducer is not None:
            self._reducer.end_backward()

    def close_window(self) -> None:
        """Before the step: agree on which parameters have a gradient."""
        if self._reducer is not None:
            self._reducer.agree_on_used()

    def drop(self) -> None:
        """Forget everything that was collected in this window."""
        if self._reducer is not None:
            self._reducer.drop()
        self._optimizer.discard()

    def _start_final(self) -> None:
        """Parameters that are updated where they lie must also not be needed by the rest of the backward pass."""
        still_waiting = []
        for segment in self._waiting:
            if segment.updated_where_used and self._still_used(segment):
                still_waiting.append(segment)
            else:
                self._optimizer.start_early(segment, copy_in_use=self._copy_in_use(segment))
        self._waiting = still_waiting

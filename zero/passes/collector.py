"""Collects gradients during the backward pass: to this rank's planes, over the other ranks, into early updates.

[Note: used again] A reentrant checkpoint (torch.utils.checkpoint with use_reentrant) runs a backward pass of its own inside
the one under way, after running its block again. Gradients that come out of it may not be the last ones, and another block
with the same weights may still be run again, of which nothing tells beforehand. Parameters that are updated where compute
uses them are therefore not updated before the outer pass is over once a gradient came from an inner one.

[Note: copies on several ranks] Ranks must hold the same groups at every use, or one would gather what another still has. When
an update starts is a matter of each rank's time; what it does to copies must not be. So an update starts only when no rank
will use the copy again in this backward pass, it renews the copy wherever there is one, it holds no memory that is evicted
(the executor waits for it), and what may have been updated early is not used before the step.
"""

from collections.abc import Callable, Sequence

import torch

from lamina.zero.gradients.planes import Gradients
from lamina.zero.gradients.reducer import Reducer
from lamina.zero.groups.segment import Segment
from lamina.zero.step.client_optimizer import ClientOptimizer
from lamina.zero.step.optimizer import TieredAdam

NO_PASS = -1  # what torch calls the absence of a backward pass


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
        self._may_run_again: set[int] = set()
        self._last_of_window = False
        self._cut = False  # whether a backward pass of this window was
        self._outer_pass = NO_PASS
        if reducer is not None:
            reducer.before_sum = self._before_more
            reducer.summed = self._final

    def update_early(self, segments: Sequence[Segment]) -> None:
        """From now on these are the segments whose update may start early."""
        self._early = {id(segment) for segment in segments}

    def begin_backward(self, *, last_of_window: bool) -> None:
        if self._reducer is not None:
            self._reducer.begin_backward()
        self._last_of_window = last_of_window
        self._outer_pass = NO_PASS
        self._gradients.begin_backward()

    def enter_pass(self) -> None:
        """Called from within the backward pass before any gradient comes: what runs now is the outer one."""
        self._outer_pass = torch._C._current_graph_task_id()

    def take(self, segment: Segment, slot_index: int, gradient: torch.Tensor) -> None:
        """Take over one parameter's gradient, and start the update of what has become final."""
        if torch._C._current_graph_task_id() != self._outer_pass:
            self._may_run_again.add(id(segment))
        if self._reducer is not None:
            self._reducer.add(segment, slot_index, gradient)
        else:
            self._before_more(segment)
            plane = self._gradients.add(segment, slot_index, gradient)
            if plane.final:
                self._final(segment)
        self._start_final()

    def end_backward(self, *, succeeded: bool) -> None:
        """The backward pass is over."""
        if not succeeded and self._reducer is not None:
            self._reducer.fail()
        self._cut |= not succeeded
        self._waiting.clear()
        self._may_run_again.clear()
        self._last_of_window = False

    def reduce_rest(self) -> None:
        """After a successful backward pass: bring what is left together over the ranks, and update what becomes final by it."""
        self._may_run_again.clear()
        if self._reducer is not None:
            self._reducer.end_backward()
        self._start_final()

    def reduce_late(self) -> None:
        """Before the micro-batch is closed: bring together over the ranks what came after a segment's turn."""
        if self._reducer is not None:
            self._reducer.reduce_late()

    def close_window(self) -> None:
        """Before the step: agree on which parameters have a gradient."""
        self._cut = False
        if self._reducer is not None:
            self._reducer.agree_on_used()

    def drop(self) -> None:
        """Forget everything that was collected in this window."""
        self._cut = False
        try:
            if self._reducer is not None:
                self._reducer.drop()
        finally:
            self._optimizer.discard()

    # -- early updates -------------------------------------------------------------------------------------------------

    def _before_more(self, segment: Segment) -> None:
        """More is coming for a segment that was taken for final (a second loss, a weight that is recomputed and used twice):
        its update will be done again. Raises RuntimeError where the gradient was given up meanwhile."""
        if not self._optimizer.started_early(segment):
            return
        plane = self._gradients[segment]
        self._optimizer.settle()
        if not plane.present and self._cut:
            raise RuntimeError(
                f"{segment.name} was updated under a backward pass that was cut short, and its gradient given up: call "
                f"zero_grad() to drop the window"
            )
        if not plane.present:
            raise RuntimeError(
                f"{segment.name} got another gradient (a second loss, or a weight that is used again) after it was updated "
                f"under the backward pass and its gradient given up, since tiers.host_bytes is short. Write "
                f"tiers.overlap_update: false; zero_grad() drops this window"
            )
        plane.edited = True

    def _final(self, segment: Segment) -> None:
        """All of a segment's gradient has come, for all that is known."""
        known = segment in self._waiting or self._optimizer.started_early(segment)
        if self._last_of_window and id(segment) in self._early and not known:
            self._waiting.append(segment)

    def _must_stay(self, segment: Segment) -> bool:
        """Whether parameters that an update changes are still needed by the rest of the backward pass. On several ranks fetched
        copies count as well: what one of them has renewed and another not yet, must not be used any more; see
        [Note: copies on several ranks]."""
        if self._reducer is not None:
            return self._copy_in_use(segment) or self._still_used(segment) or id(segment) in self._may_run_again
        return segment.updated_where_used and (self._still_used(segment) or id(segment) in self._may_run_again)

    def _start_final(self) -> None:
        """Start the updates of what is final and not needed any more."""
        still_waiting = []
        for segment in self._waiting:
            if self._must_stay(segment):
                still_waiting.append(segment)
            else:
                self._optimizer.start_early(segment, copy_in_use=self._copy_in_use(segment))
        self._waiting = still_waiting

"""Whether an engine can be used, and if not, why.

[Note: a commit that fails late] The last writes of a step and its commit go on after ``step()`` has returned. When they fail,
the engine call that meets it, or the next one, raises that error. The engine has counted the step by then and memory has its
values; on NVMe the one before counts. So it does not go on by itself: a checkpoint is loaded, or a new process resumes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lamina.tiers import StoreError
from lamina.zero import ZeroRuntime
from lamina.zero.checkpoint.target import reread_homes


class Soundness:
    """One per engine. ``broken``: why it cannot go on before a checkpoint is loaded; empty while it can."""

    def __init__(self, runtime: ZeroRuntime, drop_window: Callable[[], object]) -> None:
        self.closed = False
        self.broken = ""
        self._runtime = runtime
        self._drop_window = drop_window

    def refuse_closed(self, what: str) -> None:
        """Raise RuntimeError where the engine was closed."""
        if self.closed:
            raise RuntimeError(f"{what}: the engine was closed")

    def refuse(self, what: str, *, uncommitted: bool = False) -> None:
        """Raise RuntimeError where the engine cannot be used, or what went wrong with the last step's commit. ``uncommitted``:
        wait for that commit."""
        self.refuse_closed(what)
        self.tell_lost_commit(wait=uncommitted)
        if self.broken:
            raise RuntimeError(f"{what}: {self.broken}")

    def tell_lost_commit(self, *, wait: bool) -> None:
        """Raise what went wrong with the last step's commit, once, as far as it is known, or after a ``wait`` for it."""
        failure = self.lost_commit(wait=wait)
        if failure is not None:
            raise failure.with_traceback(None)

    def lost_commit(self, *, wait: bool) -> Exception | None:
        """The same as a value. From then on the engine is broken."""
        store = self._runtime.store
        failure = store.take_failure(wait=wait) if store is not None else None
        if failure is not None:
            self.broken = (
                f"the last step could not be committed ({failure}): load a checkpoint to go on, or start again and resume from "
                f"the step before it"
            )
            self._drop_window()
        return failure

    @contextmanager
    def meeting_lost_commit(self) -> Iterator[None]:
        """Around a pass, whose use of the store may meet the failure first: what raises there has told it."""
        try:
            yield
        except StoreError:
            self.lost_commit(wait=True)
            raise

    def recover(self, what: str, *, frozen_too: bool = False) -> None:
        """After ``what`` was cut: on NVMe the old state still counts, and what memory caches of it is read again. State that
        only memory has may be half changed: the engine then refuses to go on until a checkpoint is loaded."""
        if self.lost_commit(wait=False) is not None:
            return
        runtime = self._runtime
        at_risk = any(
            segment.kept or len(segment.stored_planes) < len(segment.planes)
            for segment in runtime.segments
            if segment.trainable or frozen_too
        )
        if at_risk or runtime.ranks.world_size > 1:
            self.broken = f"{what} was cut while state in memory was being changed: load a checkpoint to go on"
        else:
            reread_homes(runtime)

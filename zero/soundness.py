"""Whether what a runtime keeps can be used, and if not, why.

[Note: a commit that fails late] The last writes of a step and its commit go on after ``step()`` has returned. When they fail,
the call that meets it, or the next one, raises that error, once. The engine has counted the step by then and memory has its
values; on NVMe the one before counts. So nothing goes on by itself: a checkpoint is loaded, or a new process resumes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lamina.tiers import StoreError
from lamina.tiers.errors import StorageFault

from .checkpoint.target import reread_homes

if TYPE_CHECKING:
    from .runtime import ZeroRuntime

LOAD = "load a checkpoint to go on"


class Soundness:
    """One per runtime. ``broken``: why it cannot go on before a checkpoint is loaded; empty while it can. ``drop_window`` is
    called when it breaks."""

    def __init__(self, runtime: "ZeroRuntime") -> None:
        self.closed = False
        self.broken = ""
        self._mixed = False  # what memory has is a step ahead of what NVMe has
        self.drop_window: Callable[[], object] = runtime.drop_window
        self._runtime = runtime

    def refuse_closed(self, what: str) -> None:
        """Raise RuntimeError where the engine was closed."""
        if self.closed:
            raise RuntimeError(f"{what}: the engine was closed")

    def refuse(self, what: str, *, uncommitted: bool = False) -> None:
        """Raise RuntimeError where the state cannot be used, or what went wrong with the last step's commit. ``uncommitted``:
        wait for that commit."""
        self.refuse_closed(what)
        self.tell_lost_commit(wait=uncommitted)
        if self.broken:
            raise RuntimeError(f"{what}: {self.broken}")

    def refuse_mixture(self, what: str) -> None:
        """Raise what went wrong with the last step's commit as far as it is known, or RuntimeError where it has left a mixture of
        two steps. What was cut otherwise can be looked at."""
        self.tell_lost_commit(wait=False)
        if self._mixed:
            raise RuntimeError(f"{what}: {self.broken}")

    def mended(self) -> None:
        """A checkpoint was loaded."""
        self.broken, self._mixed = "", False

    def tell_lost_commit(self, *, wait: bool) -> None:
        """Raise what went wrong with the last step's commit, once, as far as it is known, or after a ``wait`` for it."""
        failure = self.lost_commit(wait=wait)
        if failure is not None:
            raise failure.with_traceback(None)

    def lost_commit(self, *, wait: bool) -> Exception | None:
        """The same as a value. From then on the runtime is broken."""
        store = self._runtime.store
        failure = store.take_failure(wait=wait) if store is not None else None
        if failure is not None:
            ways = self._ways_from_before()
            self._mixed = True
            self.broken = f"the last step could not be committed ({failure}): {ways}"
            _add_ways(failure, ways)
            self.drop_window()
        return failure

    @contextmanager
    def meeting_lost_commit(self) -> Iterator[None]:
        """Around a pass, whose use of the store may meet the failure first: what raises there has told it."""
        try:
            yield
        except StoreError as error:
            failure = self.lost_commit(wait=True)
            if failure is not None and failure is not error:
                _add_ways(error, self._ways_from_before())
            raise

    def recover(self, what: str, error: BaseException, *, frozen_too: bool = False) -> None:
        """After ``what`` was cut by an error: on NVMe the old state still counts, and what memory caches of it is read again.
        State that only memory has may be half changed: nothing goes on then until a checkpoint is loaded."""
        if self.lost_commit(wait=False) is not None:
            return
        in_memory = self._in_memory(frozen_too=frozen_too)
        if in_memory or self._runtime.ranks.world_size > 1:
            self.broken = f"{what} was cut while state in memory was being changed: {LOAD}"
            why = (
                f", since {in_memory}, may be half changed" if in_memory else ", since other ranks may be a step ahead"
            )
            _add_ways(error, f"{LOAD}{why}")
        else:
            reread_homes(self._runtime)
            _add_ways(error, "go on from there: nothing has happened")

    def _ways_from_before(self) -> str:
        """What can be done when the step before the last counts on NVMe."""
        options, in_memory = self._runtime.options, self._in_memory(frozen_too=False)
        if in_memory:
            return f"{LOAD}, since it does not hold {in_memory}"
        if not options.keep_state:
            return f"{LOAD}, since no later process finds it (tiers.keep_state is false)"
        if options.generations == 1:
            return LOAD
        return f"{LOAD}, or start again and resume from the step before it"

    def _in_memory(self, *, frozen_too: bool) -> str:
        """State that only memory has, in words; empty where there is none."""
        names = [
            segment.name
            for segment in self._runtime.segments
            if (segment.trainable or frozen_too) and (segment.kept or len(segment.stored_planes) < len(segment.planes))
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the state of {', '.join(names[:3])}{more}, which is in memory only" if names else ""


def _add_ways(error: BaseException, ways: str) -> None:
    """Say of a disk that failed what can be done, where its message does not."""
    if isinstance(error, StorageFault) and not error.torn:
        error.add_hint(f"and {ways}")

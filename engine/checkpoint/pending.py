"""A checkpoint whose state is captured, on its way to being durable and having its name: at once, or behind training.

[Note: ranks in the background] A thread must not take part in collectives beside the training thread. So each rank tells in
the partial folder how its part ended (rank<r>.done, rank<r>.failed); rank 0 waits for all of them and gives the folder its
name or removes it, and the others wait until it is not there any more.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable

from lamina.tiers.background import Background
from lamina.tiers.nvme.folder import sync_all
from lamina.zero.checkpoint.part import CapturedState

from . import folder

POLL_S = 0.02
PATIENCE_S = 3600.0
"""How long a rank waits for the others' parts before it gives up."""


class PendingSave:
    """One rank's view of it. ``path``: the checkpoint's folder, once it is complete."""

    def __init__(
        self,
        *,
        root: str,
        tag: str,
        partial: str,
        rank: int,
        world_size: int,
        captured: CapturedState,
        latest: bool,
        keep_last: int | None,
    ) -> None:
        self.path = os.path.join(root, tag)
        self.captured = captured
        self._root = root
        self._tag = tag
        self._partial = partial
        self._rank = rank
        self._world_size = world_size
        self._latest = latest
        self._keep_last = keep_last
        self._background = Background(self._run, "lamina-save")

    # -- what is left to do ------------------------------------------------------------------------------------------

    def complete_part(self) -> None:
        """Make this rank's part durable. Raises OSError, StoreError."""
        part = os.path.join(self._partial, f"rank{self._rank}")
        paths = [self.captured.path, os.path.join(part, folder.RANK_FILE), part]
        if self._rank == 0:
            paths += [os.path.join(self._partial, folder.MAIN_FILE), self._partial]
            if self._latest:
                paths.append(folder.prepare_latest(self._root, self._tag))
        try:
            sync_all(paths)
        finally:
            self.captured.drain()
        self.captured.wait()

    def finish(self) -> None:
        """On rank 0, when all parts are durable: give the folder its name. Raises OSError."""
        folder.finish(self._partial, self._root, self._tag, latest=self._latest)
        if self._keep_last is not None:
            folder.keep_last(self._root, self._keep_last, current=self._tag)

    # -- behind training ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._background.start()

    def join(self, timeout: float | None) -> None:
        """Raises TimeoutError while it is under way."""
        if not self._background.wait(timeout):
            raise TimeoutError(f"{self.path}: the checkpoint is not complete after {timeout} s")

    def result(self) -> str:
        """The folder of what has ended. Raises what went wrong."""
        if self._background.error is not None:
            raise self._background.error
        return self.path

    def _run(self) -> None:
        if self._world_size == 1:
            self._alone()
        elif self._rank == 0:
            self._lead()
        else:
            self._follow()

    def _alone(self) -> None:
        try:
            self.complete_part()
            self.finish()
        except BaseException:
            folder.abandon(self._partial)
            raise

    def _lead(self) -> None:
        try:
            try:
                self.complete_part()
            finally:
                self._await_others()
            self.finish()
        except BaseException:
            folder.abandon(self._partial)
            raise

    def _await_others(self) -> None:
        """Return when every other rank's part is durable. Raises RuntimeError with what went wrong on another one."""
        failures = []
        for rank in range(1, self._world_size):
            done, failed = self._sign(rank, "done"), self._sign(rank, "failed")
            _wait_until(functools.partial(_any_exists, done, failed), done)
            if os.path.exists(failed):
                with open(failed, encoding="utf-8") as file:
                    failures.append(f"rank {rank}: {file.read()}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(done)
        if failures:
            raise RuntimeError(f"{self.path} could not be saved: {'; '.join(failures)}")

    def _follow(self) -> None:
        inode = os.stat(self._partial).st_ino
        try:
            self.complete_part()
        except BaseException as error:
            self._tell("failed", f"{type(error).__name__}: {error}")
            _wait_until(lambda: not os.path.exists(self._partial), self._partial)
            raise
        self._tell("done", "")
        _wait_until(lambda: not os.path.exists(self._partial), self._partial)
        if not os.path.exists(self.path) or os.stat(self.path).st_ino != inode:
            raise RuntimeError(
                f"{self.path} was given up: another rank could not save its part, its error is told there"
            )

    def _sign(self, rank: int, word: str) -> str:
        return os.path.join(self._partial, f"rank{rank}.{word}")

    def _tell(self, word: str, text: str) -> None:
        """Under its name only when it is whole."""
        path = self._sign(self._rank, word)
        with open(f"{path}.tmp", "x", encoding="utf-8") as file:
            file.write(text)
        os.rename(f"{path}.tmp", path)


def _any_exists(*paths: str) -> bool:
    return any(os.path.exists(path) for path in paths)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError naming the file that did not come (or go) in time."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: another rank did not end its part of the checkpoint within {PATIENCE_S:g} s")
        time.sleep(POLL_S)

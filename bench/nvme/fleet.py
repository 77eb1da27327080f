"""Several measuring processes at once: one set of files each, started together, their rates added."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from lamina.bench.pipe import opened

from .measure import FileSet
from .points import Measured, Trial
from .worker import trial_as_dict

MODULE = "lamina.bench.nvme.worker"


class WorkerError(OSError):
    """A measuring process failed; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one process works with."""

    files: FileSet
    buffer_bytes: int
    huge_pages: bool | None = None
    read_share: float = 0.5

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the pipe."""
        return {
            "paths": [str(path) for path in self.files.paths],
            "file_bytes": self.files.file_bytes,
            "direct": self.files.direct,
            "buffer_bytes": self.buffer_bytes,
            "huge_pages": self.huge_pages,
            "read_share": self.read_share,
        }


class Fleet:
    """One process for each order, ready when the constructor returns. A context manager; close() ends them."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._workers: list[subprocess.Popen[str]] = []
        try:
            for order in orders:
                worker = subprocess.Popen(
                    [sys.executable, "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                self._workers.append(worker)
                self._send(worker, order.as_dict())
            self.page_kinds = [str(self._receive(worker)["ready"]) for worker in self._workers]
        except BaseException:
            self.close()
            raise

    def run(self, trials: Sequence[Trial]) -> list[Measured]:
        """Each process carries out its trial at the same time. Raises WorkerError."""
        for worker, trial in zip(self._workers, trials, strict=True):
            self._send(worker, trial_as_dict(trial))
        answers = [self._receive(worker) for worker in self._workers]
        return [Measured(trial=trial, **answer) for trial, answer in zip(trials, answers, strict=True)]

    def _send(self, worker: subprocess.Popen[str], data: dict[str, Any]) -> None:
        try:
            pipe = opened(worker.stdin)
            pipe.write(json.dumps(data) + "\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._dead(worker) from error

    def _receive(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        line = opened(worker.stdout).readline()
        if not line:
            raise self._dead(worker)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["errno"], f"a measuring process failed: {answer['error']}")
        return answer

    @staticmethod
    def _dead(worker: subprocess.Popen[str]) -> WorkerError:
        _, text = worker.communicate()
        lines = text.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {worker.returncode}"
        return WorkerError(None, f"a measuring process ended by itself: {reason}")

    def close(self) -> None:
        """End the processes; idempotent."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            for pipe in (worker.stdin, worker.stdout, worker.stderr):
                _close(pipe)
            worker.wait()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None and not pipe.closed:
        with contextlib.suppress(BrokenPipeError):  # an order that a dead process did not take
            pipe.close()


def add_up(measured: Sequence[Measured]) -> tuple[float, float]:
    """(read, write) bytes per second of all processes together."""
    return sum(one.read for one in measured), sum(one.write for one in measured)


def median_sum(rounds: Sequence[Sequence[Measured]]) -> tuple[float, float]:
    """Medians over rounds of the sums over processes."""
    sums = [add_up(measured) for measured in rounds]
    return statistics.median(read for read, _ in sums), statistics.median(write for _, write in sums)

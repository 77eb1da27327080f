"""A measuring process: `python -m lamina.bench.nvme.worker`, a JSON line in for each order, one out for each answer.

The first line says which files and buffers to use (answer: {"ready": page kind}), every further one is a trial. The
process ends when its input does, so it never outlives the command that started it.
"""

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from .measure import Bench, FileSet
from .points import Measured, Point, Trial, Workload


def trial_as_dict(trial: Trial) -> dict[str, Any]:
    """Plain data for the pipe."""
    point = trial.point
    return {
        "workload": trial.workload.value,
        "seconds": trial.seconds,
        "backend": point.backend,
        "block_bytes": point.block_bytes,
        "queue_depth": point.queue_depth,
        "files": point.files,
    }


def trial_from_dict(data: dict[str, Any]) -> Trial:
    """The other way."""
    point = Point(**{name: data[name] for name in ("backend", "block_bytes", "queue_depth", "files")})
    return Trial(workload=Workload(data["workload"]), point=point, seconds=data["seconds"])


def measured_as_dict(measured: Measured) -> dict[str, Any]:
    """What a trial gave, without the trial."""
    names = ("read", "write", "latency_s", "cost_s", "depth")
    return {name: getattr(measured, name) for name in names}


def serve() -> None:
    """Answer until the input ends."""
    # Ctrl-C goes to the whole group: the command that started us decides, and closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    files = FileSet(
        paths=tuple(Path(path) for path in order["paths"]), file_bytes=order["file_bytes"], direct=order["direct"]
    )
    with Bench(
        files,
        buffer_bytes=order["buffer_bytes"],
        huge_pages=order["huge_pages"],
        read_share=order["read_share"],
    ) as bench:
        _answer({"ready": bench.page_kind})
        for line in sys.stdin:
            try:
                _answer(measured_as_dict(bench.run(trial_from_dict(json.loads(line)))))
            except OSError as error:
                _answer({"error": str(error), "errno": error.errno})


def _answer(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


if __name__ == "__main__":
    # The other end closing the pipe is how we are told to stop.
    with contextlib.suppress(BrokenPipeError):
        serve()

"""What a folder's disk does at best with the bytes of a training step, for `frontier`. One line of JSON.

    python -m lamina.bench.frontier.disk '{"folder": "...", "read_bytes": ..., "written_bytes": ..., "rounds": ...}'

In a process of its own, since its buffers must not count as memory of the run.
"""

import json
import sys
from typing import Any

from lamina.aio_native import AsyncIO
from lamina.tiers import probe_mix


def measure(job: dict[str, Any]) -> list[float]:
    """Seconds, one figure for each round."""
    with AsyncIO() as io:
        return probe_mix(
            io,
            job["folder"],
            read_bytes=job["read_bytes"],
            written_bytes=job["written_bytes"],
            rounds=job["rounds"],
        )


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)

"""Runs failing_rank_script.py for each case on two ranks, which are left to end by themselves. Arguments: folder, case…

Writes for each case the exit codes in rank order (None: still there after LIMIT_S, and killed) and what the ranks ended with.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from forked_ranks import start

SCRIPT = Path(__file__).with_name("failing_rank_script.py")
LIMIT_S = 120.0


def codes_of(pids: list[int]) -> list[int | None]:
    codes: dict[int, int | None] = {}
    until = time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def main(folder: Path, cases: list[str]) -> None:
    results = {}
    for index, case in enumerate(cases):
        own = folder / str(index)
        own.mkdir()
        store, pids = start(2, str(SCRIPT), [case, str(own)])
        codes = codes_of(sorted(pids))
        ended = [json.loads(path.read_text()) for path in sorted(own.glob("ended*"))]
        results[case] = {"codes": codes, "ended": ended}
        del store
    (folder / "results").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

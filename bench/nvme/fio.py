"""fio over the same points, for comparison: direct I/O on a file of ours, with the same kind of memory.

[Note: fio and huge pages] fio's own option for huge pages (--iomem=mmaphuge) needs pages that the administrator has set
aside. Where there are too few, glibc is asked to back fio's ordinary buffers with transparent huge pages
(GLIBC_TUNABLES), which needs no privilege. What fio's memory was made of is read from its smaps while it runs.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .points import Point, Workload

TUNABLE = "glibc.malloc.hugetlb=1"
POLL_S = 0.02
START_S = 20.0
"""fio must have ended this long after its run time."""


class FioError(RuntimeError):
    """fio did not give a figure; says why."""


@dataclass(frozen=True, kw_only=True)
class FioResult:
    """One run of fio, bytes per second."""

    read: float
    write: float
    page_kind: str
    """hugetlb, thp or small."""

    @property
    def rate(self) -> float:
        """Both directions together."""
        return self.read + self.write


def find_fio() -> tuple[str, str]:
    """(path, version). Raises FioError that names the package."""
    found = shutil.which("fio", path=os.environ.get("PATH", os.defpath))
    if found is None:
        raise FioError("fio is not installed (Debian, Ubuntu, Fedora: package fio)")
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False)
    if shown.returncode:
        raise FioError(f"{found} --version failed: {shown.stderr.strip() or shown.returncode}")
    return found, shown.stdout.strip()


def free_huge_pages(file: Path = Path("/proc/meminfo")) -> int:
    """Bytes in huge pages that were set aside and nobody has taken or reserved."""
    found = dict(re.findall(r"(HugePages_\w+|Hugepagesize):\s+(\d+)", file.read_text()))
    free, reserved, size = (int(found.get(key, 0)) for key in ("HugePages_Free", "HugePages_Rsvd", "Hugepagesize"))
    return max(0, free - reserved) * size * 1024


def arguments(
    fio: str,
    file: Path,
    point: Point,
    workload: Workload,
    *,
    nbytes: int,
    seconds: float,
    read_share: float,
    hugetlb: bool,
) -> list[str]:
    """The command line for one point."""
    return [
        fio,
        "--name=lamina",
        f"--filename={str(file).replace(':', chr(92) + ':')}",
        f"--size={nbytes}",
        "--direct=1",
        "--thread",
        f"--rw={ {Workload.READ: 'read', Workload.WRITE: 'write', Workload.MIX: 'rw'}[workload] }",
        f"--rwmixread={round(100 * read_share)}",
        f"--bs={point.block_bytes}",
        f"--ioengine={'io_uring' if point.backend == 'uring' else 'libaio'}",
        f"--iodepth={point.queue_depth}",
        f"--iomem={'mmaphuge' if hugetlb else 'malloc'}",
        "--time_based",
        f"--runtime={round(1000 * seconds)}ms",
        "--overwrite=1",
        "--refill_buffers=0",
        "--output-format=json",
    ]  # fmt: skip


def run_fio(
    fio: str,
    file: Path,
    point: Point,
    workload: Workload,
    *,
    nbytes: int,
    seconds: float,
    read_share: float,
    huge_pages: bool,
    check: Callable[[], None],
) -> FioResult:
    """Measure one point. Raises FioError."""
    hugetlb = huge_pages and free_huge_pages() > 2 * point.inflight_bytes
    command = arguments(
        fio, file, point, workload, nbytes=nbytes, seconds=seconds, read_share=read_share, hugetlb=hugetlb
    )
    environment = dict(os.environ)
    if huge_pages and not hugetlb:
        environment["GLIBC_TUNABLES"] = TUNABLE
    with subprocess.Popen(
        command,
        cwd=file.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            kind = _watch(process, seconds, check)
            out, err = process.communicate(timeout=START_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise FioError(f"fio failed: {lines[-1] if lines else f'exit code {process.returncode}'}")
    read, write = _bandwidths(out)
    return FioResult(read=read, write=write, page_kind="hugetlb" if hugetlb else kind)


def _watch(process: "subprocess.Popen[bytes]", seconds: float, check: Callable[[], None]) -> str:
    """Wait for the end; the kind of pages that most of its memory consisted of."""
    huge = resident = 0
    end = time.monotonic() + seconds + START_S
    while process.poll() is None:
        check()
        if time.monotonic() > end:
            raise FioError(f"fio did not end within {seconds + START_S:.0f} s")
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            anonymous = int(text.split("Anonymous:")[1].split()[0])
            huge = max(huge, int(text.split("AnonHugePages:")[1].split()[0]))
            resident = max(resident, anonymous)
        time.sleep(POLL_S)
    return "thp" if 2 * huge > resident else "small"


def _bandwidths(out: bytes) -> tuple[float, float]:
    """(read, write) bytes per second from fio's JSON, which may have a line of text before it."""
    try:
        job: dict[str, Any] = json.loads(out[out.index(b"{") :])["jobs"][0]
        return float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"])
    except (ValueError, KeyError, IndexError) as error:
        raise FioError(f"fio's output was not understood: {out[:200]!r}") from error

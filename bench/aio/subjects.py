"""Who is compared by `lamina aio`: lamina's backends, fio and DeepSpeed's handle, each moving the same bytes of one file."""

import json
import os
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lamina.aio_native import AsyncIO, File, Priority, Read, Write
from lamina.bench.pipe import opened

GIB = 1 << 30
SMALL = 4096
PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to move and how."""

    direction: str
    """read, write or rw: half of the bytes read, half written, at once"""
    block_bytes: int
    depth: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured run."""

    gbps: float
    """1e9 bytes per second, both directions together"""
    cpu_s_per_gib: float


Subject = Callable[[Shape], Sample]


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(nbytes: int, work: Callable[[], object]) -> Sample:
    """Time and CPU time of `work`, which moves `nbytes`."""
    cpu, start = cpu_seconds(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return Sample(gbps=nbytes / seconds / 1e9, cpu_s_per_gib=cpu / (nbytes / GIB))


class Fio:
    """fio's io_uring engine on one file.

    scramble: fio marks every block anew before it is written. Nobody else here does, so it is off in what others are
    measured by; on is fio's default.
    """

    def __init__(self, path: Path, memory: str, *, scramble: bool = False) -> None:
        self._path = path
        self._scramble = scramble
        self.memory = memory

    def _run(self, *options: str) -> dict[str, Any]:
        command = ["fio", "--name=lamina", f"--filename={self._path}", "--direct=1", "--ioengine=io_uring"]
        command += [f"--iomem={self.memory}", f"--scramble_buffers={int(self._scramble)}", "--output-format=json"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fio failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-300:]}")
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job

    def run(self, shape: Shape) -> Sample:
        """Both directions together, by fio's own clock."""
        job = self._run(
            f"--rw={shape.direction}", f"--bs={shape.block_bytes}", f"--iodepth={shape.depth}", f"--size={shape.nbytes}"
        )
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        rate = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Sample(gbps=rate / 1e9, cpu_s_per_gib=cpu / (moved / GIB))

    def latency_us(self, nbytes: int, reads: int) -> float:
        """Median of one small random read at a time, submission and completion."""
        job = self._run("--rw=randread", f"--bs={SMALL}", "--iodepth=1", f"--size={nbytes}", f"--number_ios={reads}")
        read = job["read"]
        return float(read["clat_ns"]["percentile"]["50.000000"] + read["slat_ns"]["mean"]) / 1000


class Lamina:
    """One backend on one file.

    With `window` the blocks take turns in depth × block bytes of memory, as fio's do: what the processor's cache holds of it
    matters to a virtual disk. Without it every block has its own memory, as in real use.
    """

    def __init__(self, path: Path, backend: str, memory: memoryview, *, register: bool, window: bool) -> None:
        self._path = path
        self._backend = backend
        self._memory = memory
        self._register = register
        self._window = window

    def run(self, shape: Shape) -> Sample:
        """All of the shape's bytes in one transfer."""
        settings: dict[str, Any] = {"block_bytes": shape.block_bytes, "queue_depth": shape.depth}
        settings["max_inflight_bytes"] = shape.block_bytes * shape.depth  # as many as fio has
        with AsyncIO(backend=self._backend, num_threads=shape.depth, **settings) as io:  # type: ignore[arg-type]
            if self._register:
                io.register(self._memory)
            with io.open(self._path, writable=True, direct=True) as file:
                requests = self._requests(file, shape)
                return measure(shape.nbytes, lambda: io.submit(requests, priority=Priority.DEMAND).wait())

    def _requests(self, file: File, shape: Shape) -> list[Read | Write]:
        if shape.direction != "rw":
            kind = Read if shape.direction == "read" else Write
            if not self._window:
                return [kind(file, self._memory[: shape.nbytes])]
            starts = range(0, shape.nbytes, shape.block_bytes)
            return [kind(file, self._place(i, start, shape), start) for i, start in enumerate(starts)]
        mixed: list[Read | Write] = []
        half = shape.nbytes // 2
        for start in range(0, half, shape.block_bytes):  # half is read, half written, in turns as fio does
            mixed.append(Read(file, self._place(len(mixed), start, shape), start))
            mixed.append(Write(file, self._place(len(mixed), half + start, shape), half + start))
        return mixed

    def _place(self, number: int, start: int, shape: Shape) -> memoryview:
        begin = number % shape.depth * shape.block_bytes if self._window else start
        return self._memory[begin : begin + shape.block_bytes]

    def latency_us(self, nbytes: int, reads: int, *, now: bool) -> float:
        """Median of one small random read at a time through Python: read_now(), or read() and wait()."""
        rng, taken = random.Random(1), []
        with AsyncIO(backend=self._backend) as io, io.open(self._path, direct=True) as file:  # type: ignore[arg-type]
            target = self._memory[:SMALL]
            for _ in range(reads):
                offset = rng.randrange(nbytes // SMALL) * SMALL
                start = time.perf_counter_ns()
                if now:
                    io.read_now(file, target, offset)
                else:
                    io.read(file, target, offset).wait()
                taken.append(time.perf_counter_ns() - start)
        return statistics.median(taken) / 1000


class PeerError(RuntimeError):
    """DeepSpeed's handle cannot be had; says why."""


class Peer:
    """DeepSpeed's async_io handle in a process of its own interpreter. A context manager.

    Raises PeerError when the interpreter has no DeepSpeed or its extension does not build.
    """

    def __init__(self, python: str, path: Path, nbytes: int) -> None:
        folder = os.path.dirname(os.path.abspath(python))
        environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}  # its ninja
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [python, str(PEER), str(path), str(nbytes)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise PeerError(f"{python}: {error.strerror}") from error
        try:
            self.version = str(self._receive()["version"])
        except BaseException:
            self.close()
            raise

    def subject(self, memory: str) -> Subject:
        """memory: "pinned" (its own page-locked tensor) or "ordinary" (a plain tensor)."""

        def run(shape: Shape) -> Sample:
            order = {"memory": memory, "direction": shape.direction, "depth": shape.depth}
            stdin = opened(self._process.stdin)
            stdin.write(json.dumps(order | {"block_bytes": shape.block_bytes, "nbytes": shape.nbytes}) + "\n")
            stdin.flush()
            answer = self._receive()
            return Sample(
                gbps=shape.nbytes / answer["seconds"] / 1e9,
                cpu_s_per_gib=answer["cpu_s"] / (shape.nbytes / GIB),
            )

        return run

    def _receive(self) -> dict[str, Any]:
        line = opened(self._process.stdout).readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended by itself"}
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process; idempotent."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""How near the C Adam comes to the memory's own speed, and to torch's: `python -m lamina.bench adam`.

Every round runs each contender on the same huge-page planes, so that a disturbance hits all of them; what is reported are
medians over the rounds, and medians of the ratios inside a round. The ceiling is the best of three ways to read and write
three streams with the same footprint, on the same threads, in the same round.

A contender is called twice, after a rest in which the threads of the one before go to sleep: OpenMP's spin for some 20 ms
after their work, on the cores that the next one needs. The first call finds its own threads asleep, as a training loop does
after a pause ("first"); the second is what is compared.
"""

import argparse
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.zero.adam.cpu_adam import CPUAdam
from lamina.zero.adam.kernels import AdamHyper, AdamPlanes, DType, Kernels

HUGE_PAGE = 2 << 20
FP32_BYTES = 28  # moved per parameter: read p, g, m, v; write p, m, v
SPLIT_BYTES = 26  # read p, remainder, g (2 each), m, v; write p, remainder, m, v
STREAM_BYTES = 24  # per element of the ceiling: three reads, three writes
FOOTPRINT_BYTES = 16  # of the fp32 step; the ceiling's planes together are as large
HYPER = AdamHyper(lr=1e-3, weight_decay=0.01, step=10)
REST_S = 0.03


class HugePlanes:
    """Tensors carved out of one reservation on transparent huge pages."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes = whole[-whole.data_ptr() % HUGE_PAGE :][:nbytes]
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """numel elements at a multiple of 4 KiB, zeroed."""
        nbytes = numel * dtype.itemsize
        begin = self._used
        self._used = (begin + nbytes + 4095) // 4096 * 4096
        if self._used > self._bytes.numel():
            raise ValueError(f"{nbytes} bytes asked, {self._bytes.numel() - begin} left")
        return self._bytes[begin : begin + nbytes].view(dtype).zero_()


@dataclass(kw_only=True)
class Contender:
    """One way to do the step. `bytes_moved` per parameter counts what the algorithm must move; 0: no bandwidth."""

    name: str
    run: Callable[[], object]
    bytes_moved: int
    compare_with: tuple[str, ...] = ()
    seconds: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)


class Workbench:
    """The planes of one size and the contenders on them."""

    def __init__(self, numel: int, threads: int, *, kernels: Kernels, slow_too: bool) -> None:
        self.numel = numel
        planes = HugePlanes(numel * 38 + 64 * HUGE_PAGE)
        random = torch.Generator().manual_seed(0)
        self._kernels = kernels
        self._param = planes.take(numel, torch.float32).copy_(torch.randn(numel, generator=random) * 0.02)
        self._grad = planes.take(numel, torch.float32).copy_(torch.randn(numel, generator=random) * 0.01)
        self._exp_avg = planes.take(numel, torch.float32)
        self._exp_avg_sq = planes.take(numel, torch.float32).fill_(1e-4)
        self._low = planes.take(numel, torch.bfloat16).copy_(self._param)
        self._low_grad = planes.take(numel, torch.bfloat16).copy_(self._grad)
        self._remainder = planes.take(numel, torch.int16)
        self._stream = [planes.take(numel * FOOTPRINT_BYTES // 24, torch.float32) for _ in range(6)]
        self.contenders = [*self._ceilings(), *self._ours(), *self._torch_ways(slow_too)]
        self.contenders += self._deepspeed_ways()

    def _ceilings(self) -> list[Contender]:
        # In place on three planes that are together as large as the six of the copy.
        half = [t.data_ptr() for t in self._stream]
        n = self._stream[0].numel()
        pairs = [(half[0:3], half[0:3]), (half[3:6], half[3:6])]

        def in_place() -> None:
            for source, target in pairs:
                self._kernels.stream(n, source=source, target=target)

        def copy() -> None:
            self._kernels.stream(n, source=half[:3], target=half[3:])

        def copy_around_cache() -> None:
            self._kernels.stream(n, source=half[:3], target=half[3:], non_temporal=True)

        per_param = n / self.numel
        ways = {"stream in place": (in_place, 2), "stream copy": (copy, 1), "stream copy nt": (copy_around_cache, 1)}
        return [
            Contender(name=name, run=run, bytes_moved=round(STREAM_BYTES * per_param * times))
            for name, (run, times) in ways.items()
        ]

    def _ours(self) -> list[Contender]:
        exp_avg, exp_avg_sq = self._exp_avg.data_ptr(), self._exp_avg_sq.data_ptr()

        fp32 = AdamPlanes(
            n=self.numel,
            param=self._param.data_ptr(),
            param_dtype=DType.FP32,
            grad=self._grad.data_ptr(),
            grad_dtype=DType.FP32,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )
        split = AdamPlanes(
            n=self.numel,
            param=self._low.data_ptr(),
            param_dtype=DType.BF16,
            remainder=self._remainder.data_ptr(),
            grad=self._low_grad.data_ptr(),
            grad_dtype=DType.BF16,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )

        optimizer = CPUAdam([self._fp32_parameter()], lr=1e-3, weight_decay=0.01, num_threads=self._kernels.num_threads)
        self._adopt_state(optimizer)
        return [
            Contender(name="lamina fp32", run=lambda: self._kernels.adam(fp32, HYPER), bytes_moved=FP32_BYTES),
            Contender(
                name="CPUAdam fp32",
                run=optimizer.step,
                bytes_moved=FP32_BYTES,
                compare_with=("torch fused", "torch default", "DeepSpeed"),
            ),
            Contender(
                name="lamina bf16",
                run=lambda: self._kernels.adam(split, HYPER),
                bytes_moved=SPLIT_BYTES,
                compare_with=("torch fused mixed", "DeepSpeed mixed"),
            ),
        ]

    def _fp32_parameter(self) -> torch.Tensor:
        param = self._param.detach().requires_grad_()
        param.grad = self._grad
        return param

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a fresh optimizer the huge-page moments, so that pages are no part of the comparison."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {
                    "step": torch.tensor(9.0),
                    "exp_avg": self._exp_avg,
                    "exp_avg_sq": self._exp_avg_sq,
                }

    def _torch_ways(self, slow_too: bool) -> list[Contender]:
        fused = torch.optim.AdamW([self._fp32_parameter()], lr=1e-3, weight_decay=0.01, fused=True)
        self._adopt_state(fused)
        ways = [
            Contender(name="torch fused", run=fused.step, bytes_moved=FP32_BYTES),
            Contender(name="torch fused mixed", run=self._mixed(fused), bytes_moved=FP32_BYTES),
        ]
        if slow_too:
            default = torch.optim.AdamW([self._fp32_parameter()], lr=1e-3, weight_decay=0.01)
            self._adopt_state(default)
            ways.append(Contender(name="torch default", run=default.step, bytes_moved=FP32_BYTES))
        return ways

    def _mixed(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """The peers' way to bf16 training with an fp32 master: widen the gradient, step, narrow the copy."""

        def run() -> None:
            self._grad.copy_(self._low_grad)
            optimizer.step()
            self._low.copy_(self._param)

        return run

    def _deepspeed_ways(self) -> list[Contender]:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return []
        optimizer = DeepSpeedCPUAdam([self._fp32_parameter()], lr=1e-3, weight_decay=0.01)
        self._adopt_state(optimizer)
        for state in optimizer.state.values():
            state["step"] = 9
        return [
            Contender(name="DeepSpeed", run=optimizer.step, bytes_moved=FP32_BYTES),
            Contender(name="DeepSpeed mixed", run=self._mixed(optimizer), bytes_moved=FP32_BYTES),
        ]


def measure(bench: Workbench, rounds: int) -> None:
    """Runs each contender twice per round, every round beginning with another one."""
    contenders = bench.contenders
    for contender in contenders:
        contender.run()
    for index in range(rounds):
        shift = index % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            time.sleep(REST_S)
            for seconds in (contender.first_seconds, contender.seconds):
                begin = time.perf_counter()
                contender.run()
                seconds.append(time.perf_counter() - begin)


def rows_of(bench: Workbench, threads: int) -> list[dict[str, Any]]:
    """One row per contender: median ms, 1e9 parameters/s, GB/s and the median ratios taken inside each round."""
    by_name = {c.name: c for c in bench.contenders}
    rounds = range(len(bench.contenders[0].seconds))
    streams = [c for c in bench.contenders if c.name.startswith("stream")]
    ceiling = [max(c.bytes_moved / c.seconds[i] for c in streams) for i in rounds]
    rows = []
    for c in bench.contenders:
        seconds = statistics.median(c.seconds)
        row: dict[str, Any] = {
            "threads": threads,
            "numel": bench.numel,
            "name": c.name,
            "ms": seconds * 1e3,
            "first_ms": statistics.median(c.first_seconds) * 1e3,
            "gparam_per_s": bench.numel / seconds / 1e9,
            "gb_per_s": bench.numel * c.bytes_moved / seconds / 1e9,
            "of_ceiling": statistics.median(c.bytes_moved / c.seconds[i] / ceiling[i] for i in rounds),
        }
        for other in c.compare_with:
            if other in by_name:
                ratios = [by_name[other].seconds[i] / c.seconds[i] for i in rounds]
                row[f"times {other}"] = statistics.median(ratios)
        rows.append(row)
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        ratios = "  ".join(f"{row[k]:.2f}x {k.removeprefix('times ')}" for k in row if k.startswith("times "))
        times = f"{row['ms']:>9.3f} {row['first_ms']:>9.3f}"
        rates = f"{row['gparam_per_s']:>7.2f} {row['gb_per_s']:>7.1f} {row['of_ceiling']:>8.2f}"
        print(f"{row['threads']:>2} {row['numel']:>11,} {row['name']:<18} {times} {rates}  {ratios}")


def numbers(text: str) -> list[int]:
    """Parses "1,2" or "1e6,1e7"."""
    try:
        values = [int(float(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: a list like 1,2 or 1e6,1e7 is wanted") from error
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lamina bench adam", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="thread counts, such as 1,2")
    parser.add_argument("--sizes", type=numbers, default=[10**6, 10**7, 10**8], help="parameters, such as 1e6,1e7")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per size; 0 chooses by size")
    parser.add_argument("--path", default=None, help="force a dispatch path: avx512, avx2, neon, portable")
    parser.add_argument("--no-default", action="store_true", help="leave out torch's default loop, the slowest")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"machine": platform.machine(), "torch": torch.__version__}
    before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            with Kernels(threads, path=options.path) as kernels:
                facts["path"] = kernels.path
                if not options.json and not rows:
                    print(f"path {kernels.path}, torch {torch.__version__}, {platform.machine()}; medians")
                    print(" t  parameters contender                 ms  first ms  Gpar/s    GB/s  ceiling  faster than")
                for numel in options.sizes:
                    bench = Workbench(numel, threads, kernels=kernels, slow_too=not options.no_default)
                    rounds = options.rounds or max(9, min(51, int(2e8 / numel)))
                    show_progress(options.json, f"{threads} threads, {numel:,} parameters, {rounds} rounds")
                    measure(bench, rounds)
                    show_progress(options.json, "")
                    new = rows_of(bench, threads)
                    rows += new
                    if not options.json:
                        print_rows(new)
    finally:
        torch.set_num_threads(before)
    print(json.dumps({"benchmark": "adam", **facts, "rows": rows}))
    return 0


def show_progress(quiet: bool, text: str) -> None:
    """One line that is overwritten, on a terminal only."""
    if not quiet and sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

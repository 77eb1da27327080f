"""Collectives between the ranks that share a model's state; with one rank they cost nothing.

Gathers and reductions have process groups of their own: gathers are waited for in the order of use, reductions run
beside them in a fixed order, and a rank that is late with one never blocks the other.

[Note: ranks that diverge] A rank that takes another branch gathers another group, and the collectives of the two would pair
up: garbage where the sizes agree, else a wait without end. So the ranks compare a few bytes before each gather, and what
fails in a collective is told together with what this rank wanted; see also [Note: ranks that wait for ever]. Such bytes, and
all that is small, go over a group on the CPU: with an accelerator it is one of gloo's beside NCCL's, so that the CPUs meet,
but none waits for its stream.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist

from .fixed_order import FixedOrder
from .lanes import Lane
from .notices import Board

DEFAULT_TIMEOUT = timedelta(minutes=10)
CHECKS, GATHERS, REDUCTIONS, SUMS = range(4)  # lanes


class DivergenceError(RuntimeError):
    """The ranks do not make the same calls, or one of them has ended."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def timeout_of_default_group(device: torch.device) -> timedelta:
    """What the user has set for torch.distributed's default group, where torch tells it."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", DEFAULT_TIMEOUT)


@dataclass(kw_only=True)
class Ranks:
    """This rank's view of the others. ``seconds`` counts the time that was waited for collectives."""

    rank: int = 0
    world_size: int = 1
    board: Board | None = None
    lanes: Sequence[Lane] = ()  # the first is on the CPU, for what is small or compared; see [Note: ranks that diverge]
    fixed_order: FixedOrder | None = None  # on the CPU: see [Note: order of sums]; else the backend's own order
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where the backend wants tensors
    seconds: float = 0.0
    bytes_sent: int = 0

    @classmethod
    def of_process(cls, device: torch.device | None = None, timeout: timedelta | None = None) -> "Ranks":
        """The ranks of torch.distributed's default group, or a single one when it is not initialised."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        device, rank, world_size = device or torch.device("cpu"), dist.get_rank(), dist.get_world_size()
        timeout = timeout or timeout_of_default_group(device)
        on_cpu = device.type == "cpu"
        checks = dist.new_group(timeout=timeout, backend="gloo")
        groups = [checks, *(dist.new_group(timeout=timeout) for _ in range(3 if on_cpu else 2))]
        store_of = getattr(checks, "get_group_store", None)  # not in every torch
        board = Board(
            rank=rank, world_size=world_size, store=store_of() if store_of else None, started=[0] * len(groups)
        )
        lanes = [
            Lane(group=group, board=board, number=number, on_cpu=on_cpu or number == CHECKS)
            for number, group in enumerate(groups)
        ]
        order = None
        if on_cpu:
            order = FixedOrder(rank=rank, world_size=world_size, exchanges=lanes[REDUCTIONS], gathers=lanes[SUMS])
        return cls(rank=rank, world_size=world_size, board=board, lanes=lanes, fixed_order=order, device=device)

    def take_seconds(self) -> float:
        """Seconds waited for collectives since this was last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def leave(self) -> None:
        """Tell the others, who may wait for this rank, that it will not come any more."""
        if self.board is not None:
            self.board.leave()

    def close(self) -> None:
        """Leave, and give the process groups back, without waiting for others."""
        self.leave()
        for lane in self.lanes:
            lane.close()
        self.board, self.lanes, self.fixed_order = None, (), None

    # -- parameters --------------------------------------------------------------------------------------------------

    def all_gather(self, flat: torch.Tensor, what: str = "parameters") -> None:
        """Fill ``flat`` (1-d) from all ranks; this rank's equal part of it is already in place. ``what`` names it in errors.

        Raises RuntimeError, naming both, when another rank gathers something else or nothing at all until the timeout.
        """
        if self.world_size == 1 or flat.numel() == 0:
            return
        began = time.perf_counter()
        part = flat.numel() // self.world_size
        mine = flat[self.rank * part : (self.rank + 1) * part]
        with self._explained(f"gathering {what}"):
            self._require_same_gather(what, flat.numel())
            self.lanes[GATHERS].run(what, dist.all_gather_into_tensor, flat, mine)
        self._account(began, mine)

    def _require_same_gather(self, what: str, numel: int) -> None:
        mine = torch.tensor([zlib.crc32(what.encode()), numel], dtype=torch.int64)
        everyone = torch.empty(2 * self.world_size, dtype=torch.int64)
        self.lanes[CHECKS].run(what, dist.all_gather_into_tensor, everyone, mine)
        if not torch.equal(everyone.view(-1, 2), mine.expand(self.world_size, 2)):
            self.require_same("what is gathered", what)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Say what this rank was doing when a collective fails."""
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DivergenceError):
                raise
            seconds, left = time.perf_counter() - began, self.board.who_left() if self.board is not None else ""
            raise DivergenceError(
                f"rank {self.rank} of {self.world_size}: {doing} failed after {seconds:.0f} s. Another "
                f"rank has ended, or makes other calls: all ranks must use the same modules in the same order ({error}){left}"
            ) from error

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """The values of rank ``source`` for everybody."""
        if self.world_size > 1 and tensor.numel():
            began = time.perf_counter()
            there = tensor.contiguous().to(self.device)
            with self._explained("handing out values"):
                self.lanes[GATHERS].run("handing out values", dist.broadcast, there, source)
            tensor.copy_(there)
            self._account(began, tensor)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def start_reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, what: str) -> Work:
        """Begin to sum ``flat`` over the ranks; after ``wait`` this rank's part of the sum is in ``shard``. ``what`` is told in
        errors."""
        if self.world_size == 1:
            shard.copy_(flat)
            return _Done()
        self.bytes_sent += flat.numel() * flat.element_size()
        if self.fixed_order is not None:
            return self.fixed_order.start_reduce_scatter(flat, shard, what)
        return self.lanes[REDUCTIONS].start(what, dist.reduce_scatter_tensor, shard, flat)

    def start_all_reduce(self, flat: torch.Tensor, what: str) -> Work:
        """Begin to sum ``flat`` over the ranks, in place."""
        if self.world_size == 1:
            return _Done()
        self.bytes_sent += flat.numel() * flat.element_size()
        if self.fixed_order is not None and self.world_size > 2:  # two values have one sum
            return self.fixed_order.start_all_reduce(flat, what)
        return self.lanes[REDUCTIONS].start(what, dist.all_reduce, flat)

    def sum_bits(self, tensor: torch.Tensor) -> None:
        """Put together, in place, a tensor of which every rank has filled other elements and left the rest zero."""
        if self.world_size > 1 and tensor.numel():
            began = time.perf_counter()
            there = tensor.view(torch.uint8).to(self.device)  # as bytes: keeps -0.0 and NaN
            with self._explained("reading whole state"):
                self.lanes[GATHERS].run("reading whole state", dist.all_reduce, there)
            tensor.view(torch.uint8).copy_(there)
            self._account(began, tensor)

    def wait(self, work: Work) -> None:
        began = time.perf_counter()
        with self._explained("reducing gradients"):
            work.wait()
        self.seconds += time.perf_counter() - began

    # -- small things --------------------------------------------------------------------------------------------------

    def mean(self, value: float, doing: str) -> float:
        """Mean of a number over the ranks, in double precision and the same on all of them. ``doing``: as in ``union``."""
        return sum(numbers[0] for numbers in self.gather_numbers([value], doing)) / self.world_size

    def exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[torch.Tensor]], doing: str
    ) -> None:
        """Give ``sent[r]`` to rank r, and fill ``received[r]`` with what it gives to this one (fp32, 1-d). Lengths must match."""
        began = time.perf_counter()
        ours, theirs = ([sum(map(len, parts)) for parts in side] for side in (sent, received))
        mine = torch.cat([torch.empty(0), *(part for parts in sent for part in parts)])
        arrived = torch.empty(sum(theirs))
        with self._explained(doing):
            self.lanes[CHECKS].run(doing, dist.all_to_all_single, arrived, mine, theirs, ours)
        parts = [part for parts in received for part in parts]
        for part, values in zip(parts, torch.split(arrived, [len(part) for part in parts]), strict=True):
            part.copy_(values)
        self._account(began, mine)

    def union(self, flags: Sequence[bool], doing: str = "agreeing on which parameters were used") -> list[bool]:
        """Element-wise or over the ranks. ``doing`` tells in errors what it was for."""
        if self.world_size == 1 or not flags:
            return list(flags)
        began = time.perf_counter()
        mask = torch.tensor(flags, dtype=torch.uint8)
        with self._explained(doing):
            self.lanes[CHECKS].run(doing, dist.all_reduce, mask, op=dist.ReduceOp.MAX)
        self._account(began, mask)
        return [bool(flag) for flag in mask.tolist()]

    def require_same(self, what: str, value: str) -> None:
        """Raises DivergenceError on every rank, with both values, when the ranks do not agree."""
        values = self.gather_texts(value)
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
            raise DivergenceError(f"{what} differs between ranks: {listed}. All ranks must make the same calls")

    def gather_numbers(self, numbers: Sequence[float], doing: str) -> list[list[float]]:
        """Every rank's numbers, in rank order, in double precision and the same on all of them."""
        if self.world_size == 1:
            return [list(numbers)]
        began = time.perf_counter()
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        everyone = torch.empty(self.world_size * len(numbers), dtype=torch.float64)
        with self._explained(doing):
            self.lanes[CHECKS].run(doing, dist.all_gather_into_tensor, everyone, mine)
        self._account(began, mine)
        rows: list[list[float]] = everyone.view(self.world_size, -1).tolist()
        return rows

    def greatest(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        return max(int(numbers[0]) for numbers in self.gather_numbers([number], "looking whether all go on"))

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Slow: for what happens seldom."""
        if self.world_size == 1:
            return [text]
        mine = text.encode()
        lengths = [int(row[0]) for row in self.gather_numbers([len(mine)], "comparing texts")]
        padded = torch.frombuffer(bytearray(mine.ljust(max(1, *lengths))), dtype=torch.uint8)
        everyone = torch.empty(self.world_size * len(padded), dtype=torch.uint8)
        with self._explained("comparing texts"):
            self.lanes[CHECKS].run("comparing texts", dist.all_gather_into_tensor, everyone, padded)
        rows = everyone.view(self.world_size, -1).numpy()
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def _account(self, began: float, sent: torch.Tensor) -> None:
        self.seconds += time.perf_counter() - began
        self.bytes_sent += sent.numel() * sent.element_size()

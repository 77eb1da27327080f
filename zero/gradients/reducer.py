"""Brings the gradients of all ranks together: one bucket per segment, summed while the backward pass goes on.

Every rank starts its reductions in one fixed order (the segments from last to first), so that they always meet the right
partners, whatever order the gradients come in and whichever parameters a rank did not use.

[Note: final on several ranks] A parameter has a gradient when any rank used it. A rank that had one for every parameter of
a segment therefore knows, without asking, what all will agree on at the window's end: all of them are used. Once the
segment's sum has arrived its gradient is final there. A rank that did not use one of them waits for the agreement; that it
updates later than others changes nothing, since each updates its own shard.

[Note: dropped windows] Sums are paired by their order, so a rank whose backward pass has failed must not simply begin the next
one: all ranks drop the window together, after they have made the sums that any of them has begun.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lamina.tiers import Block
from lamina.zero.groups.memory import tensor_over
from lamina.zero.groups.segment import Segment
from lamina.zero.ranks.collectives import DivergenceError, Ranks, Work

from .bucket_room import BucketRoom
from .planes import Gradients

BUCKETS_UNDER_WAY = 2  # what the placement has room for besides the one being filled


@dataclass(kw_only=True, eq=False)
class _Bucket:
    """All of a segment's gradients of one micro-batch, and the sum's way to this rank's shard."""

    segment: Segment
    block: Block
    flat: torch.Tensor
    arrived: set[int] = field(default_factory=set)
    shard: torch.Tensor | None = None
    work: Work | None = None
    taken: bool = False
    """Whether the sum was added to this rank's plane."""

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.segment.parameters)

    @property
    def has_come(self) -> bool:
        """Whether the sum is there already."""
        return self.work is not None and self.work.is_completed()


class Reducer:
    """Used with several ranks only. ``room`` gives memory of the device tier for buckets.

    ``before_sum`` is called with every segment whose sum has arrived, before it is added to the rank's plane, and ``summed``
    after it, where this rank had a gradient for every parameter; see [Note: final on several ranks].
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        gradients: Gradients,
        ranks: Ranks,
        room: BucketRoom,
    ) -> None:
        self._order = [segment for segment in reversed(segments) if segment.trainable]
        self._gradients = gradients
        self._ranks = ranks
        self._room = room
        self._open: dict[int, _Bucket] = {}
        self._started: list[_Bucket] = []
        self._spare: list[Block] = []
        self._next = 0
        self._used: dict[int, set[int]] = {}
        self._passes = 0  # of this window
        self._failed = self._dropping = False
        self.before_sum: Callable[[Segment], None] = lambda _: None
        self.summed: Callable[[Segment], None] = lambda _: None

    def begin_backward(self) -> None:
        """Raises RuntimeError after a pass that failed, until the window is dropped."""
        self._refuse_failed()
        self._next = 0
        self._passes += 1

    def fail(self) -> None:
        """The backward pass has failed on this rank; see [Note: dropped windows]."""
        self._failed = True

    def _refuse_failed(self) -> None:
        if self._failed:
            raise RuntimeError("a backward pass of this window has failed: zero_grad(), on all ranks, drops the window")

    def add(self, segment: Segment, slot_index: int, gradient: torch.Tensor) -> None:
        """Put one parameter's gradient into its bucket; start every reduction whose turn it is."""
        bucket = self._open.get(id(segment))
        if bucket is None:
            bucket = self._open[id(segment)] = self._new_bucket(segment)
        slot = segment.layout.slots[slot_index]
        into = bucket.flat[slot.offset : slot.end].view(slot.shape)
        if slot_index in bucket.arrived:
            into.add_(gradient)
        else:
            into.copy_(gradient)
            bucket.arrived.add(slot_index)
        if bucket.complete:
            self._start_ready()
        for started in self._started:
            if not started.taken:
                if not started.has_come:
                    break
                self._take_sum(started)

    def end_backward(self) -> None:
        """Reduce what is left, parameters that this rank did not use as zeros, and wait for all of it."""
        self._refuse_failed()
        while self._next < len(self._order):
            segment = self._order[self._next]
            self._next += 1
            self._start(self._take_bucket(segment))
        while self._started:
            self._finish_oldest()

    def reduce_late(self) -> None:
        """Reduce what came after a segment's sum was begun, on any rank: a block that is recomputed with the weights of another
        one, or a second backward pass of the user's own. Collective."""
        late = self._ranks.union([id(segment) in self._open for segment in self._order])
        for segment, on_any in zip(self._order, late, strict=True):
            if on_any:
                self._start(self._take_bucket(segment))
        while self._started:
            self._finish_oldest()

    def agree_on_used(self) -> None:
        """At the end of a window: a parameter has a gradient when any rank had one. Collective."""
        flags = [
            index in self._used.get(id(segment), ())
            for segment in self._order
            for index in range(len(segment.parameters))
        ]
        agreed = iter(self._ranks.union(flags))
        for segment in self._order:
            used = {index for index in range(len(segment.parameters)) if next(agreed)}
            plane = self._gradients[segment]
            plane.arrived = used if plane.present else set()
            if not used:
                plane.release()
        self._used.clear()
        self._passes = 0

    def drop(self) -> None:
        """Forget what the window has brought. Collective where it has brought anything, or failed; see [Note: dropped windows].
        Raises DivergenceError where other ranks go on with it."""
        try:
            if self._failed or self._open or self._used or self._started:
                self._dropping = True
                self._begin_what_others_have()
                while self._started:
                    self._finish_oldest()
        finally:
            self._failed = self._dropping = False
            self._spare += [bucket.block for bucket in (*self._open.values(), *self._started)]
            self._started.clear()
            self._open.clear()
            self._used.clear()
            self._passes = 0

    def _begin_what_others_have(self) -> None:
        rows = self._ranks.gather_numbers([self._passes, self._next], "dropping a window")
        if len({passes for passes, _ in rows}) > 1:
            raise DivergenceError(
                f"the ranks have dropped their windows after {[int(passes) for passes, _ in rows]} backward passes: all "
                f"must drop the same one. Load a checkpoint to go on"
            )
        while self._next < max(begun for _, begun in rows):
            segment = self._order[self._next]
            self._next += 1
            self._start(self._take_bucket(segment))

    # -- mechanism -----------------------------------------------------------------------------------------------------

    def _take_bucket(self, segment: Segment) -> _Bucket:
        """The segment's gradients of this rank; zeros where it has none."""
        open_one = self._open.pop(id(segment), None)
        return open_one if open_one is not None else self._new_bucket(segment)

    def _new_bucket(self, segment: Segment) -> _Bucket:
        owner = f"gradient bucket of {segment.name}"
        while len(self._started) >= BUCKETS_UNDER_WAY:
            self._finish_oldest()
        block = self._take_block(segment.nbytes, owner)
        flat = tensor_over(block, segment.dtype, segment.layout.numel, device=segment.device).zero_()
        return _Bucket(segment=segment, block=block, flat=flat)

    def _take_block(self, nbytes: int, owner: str) -> Block:
        """The smallest spare block that is large enough, else a new one in place of the spare ones.

        Blocks are kept rather than given back: a collective's work object may hold its tensors a little longer than the
        collective takes, so that the memory would come back late.
        """
        fitting = [block for block in self._spare if block.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            self._spare.remove(best)
            return best
        for block in self._spare:
            self._room.give_back(block)
        self._spare.clear()
        return self._room.alloc(nbytes, owner)

    def _start_ready(self) -> None:
        while self._next < len(self._order):
            bucket = self._open.get(id(self._order[self._next]))
            if bucket is None or not bucket.complete:
                return
            self._next += 1
            self._start(self._open.pop(id(bucket.segment)))

    def _start(self, bucket: _Bucket) -> None:
        segment = bucket.segment
        what = f"the gradients of {segment.name}"
        self._used.setdefault(id(segment), set()).update(bucket.arrived)
        if segment.layout.world_size == 1:  # every rank keeps all of it
            bucket.shard = bucket.flat
            bucket.work = self._ranks.start_all_reduce(bucket.flat, what)
        else:
            bucket.shard = torch.empty(segment.layout.shard_numel, dtype=segment.dtype, device=bucket.flat.device)
            bucket.work = self._ranks.start_reduce_scatter(bucket.flat, bucket.shard, what)
        self._started.append(bucket)

    def _finish_oldest(self) -> None:
        """Its block is spare only now, also where the sum has come before: what is evicted for want of blocks must be the same on
        all ranks, or some would gather what others still have."""
        bucket = self._started.pop(0)
        if not bucket.taken:
            self._take_sum(bucket)
        self._spare.append(bucket.block)

    def _take_sum(self, bucket: _Bucket) -> None:
        if bucket.work is None or bucket.shard is None:
            raise RuntimeError(f"the reduction of {bucket.segment.name} was not started")
        self._ranks.wait(bucket.work)
        if self._dropping:
            return
        bucket.shard.div_(self._ranks.world_size)
        self.before_sum(bucket.segment)
        self._gradients.add_shard(bucket.segment, bucket.shard)
        bucket.taken = True
        if bucket.complete:
            self.summed(bucket.segment)

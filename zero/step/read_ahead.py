"""Optimizer state that is read before its gradient is there: the first sub-groups of a step's update wait in their buffers.

[Note: reading ahead] Between two updates the buffers are empty and the disk is often idle. So once a step is over the
sub-groups that its update began with are read again, from the generation that it made, for the next one, which as a rule
takes the same order; and whenever buffers are free before their gradients are there, those that follow. Parameters are left out:
they may be copied from memory when their turn comes. What was read counts only for the very sub-group, planes and generation that
the update then asks for; else it is dropped and read as usual.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.aio_native import Priority
from lamina.tiers import Block, GenerationStore, Plane, TransferHandle
from lamina.zero.groups.partition import round_up
from lamina.zero.groups.segment import Segment

STAGING_ALIGN = 4096


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Segments in the order in which their updates will probably come."""

    order: tuple[Segment, ...]


@dataclass(kw_only=True)
class Early:
    """Elements [begin, end) of a shard on their way into a buffer; ``offsets`` of all planes that the buffer is to hold."""

    segment: Segment
    begin: int
    end: int
    staging: Block
    offsets: dict[Plane, int]
    handles: list[TransferHandle]
    version: int
    started: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """Bytes of what is read."""
        planes = (spec for spec in self.segment.stored_planes if spec.plane is not Plane.PARAM)
        return (self.end - self.begin) * sum(spec.itemsize for spec in planes)


class ReadAhead:
    """The buffers that hold, or are being filled with, what is expected. Used by the update thread only."""

    def __init__(self, store: GenerationStore | None, sub_group_numel: int) -> None:
        self._store = store
        self._sub_group_numel = sub_group_numel
        self._waiting: deque[Early] = deque()
        self._expected: deque[tuple[Segment, int, int]] = deque()
        self._version = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unfinished(self) -> bool:
        """Whether more is expected than there were buffers for."""
        return bool(self._expected)

    def expect(self, order: Sequence[Segment]) -> None:
        """What is to be read next, of the generation that the store reads from now, as there are buffers: see ``go_on``."""
        if self._store is not None:
            self._version = self._store.version
            self._expected.extend(_sub_groups(order, self._sub_group_numel))

    def go_on(self, free: deque[Block]) -> None:
        """Begin to fill the free buffers with what is expected."""
        while free and self._expected:
            segment, begin, end = self._expected.popleft()
            staging, offsets = free.popleft(), buffer_offsets(segment, end - begin)
            try:
                # After everything else: nothing waits for it yet.
                handles = start_reads(
                    self._store,
                    segment,
                    begin,
                    end,
                    staging,
                    offsets,
                    priority=Priority.WRITE_BACK,
                    version=self._version,
                )
            except (OSError, RuntimeError, LookupError, ValueError):
                # Nobody asked for it yet, and it may have moved: whoever asks for it reads it again and is told.
                free.append(staging)
                self._expected.clear()
                return
            self._waiting.append(
                Early(
                    segment=segment,
                    begin=begin,
                    end=end,
                    staging=staging,
                    offsets=offsets,
                    handles=handles,
                    version=self._version,
                )
            )

    def take(self, segment: Segment, begin: int, end: int, offsets: dict[Plane, int], *, version: int) -> Early | None:
        """What was read ahead for this sub-group; None where that is not what comes next, or of another ``version``."""
        first = self._waiting[0] if self._waiting else None
        if first is None or first.segment is not segment or (first.begin, first.end) != (begin, end):
            return None
        if first.offsets != offsets or first.version != version:
            return None
        return self._waiting.popleft()

    def passed(self, segment: Segment, begin: int, end: int) -> bool:
        """Whether this is what comes next and nothing is read of it yet, so that the rest stays in order when it is read now."""
        first = not self._waiting and bool(self._expected) and self._expected[0] == (segment, begin, end)
        if first:
            self._expected.popleft()
        return first

    def forget(self) -> Iterator[Block]:
        """Drop everything; the buffers, once nothing touches them."""
        self._expected.clear()
        while self._waiting:
            early = self._waiting.popleft()
            settle(early.handles)  # nobody asked for it yet: whoever does reads it again and is told
            yield early.staging


def buffer_offsets(segment: Segment, numel: int, *, from_store: bool = False) -> dict[Plane, int]:
    """Byte offset in an update buffer of every plane that passes through it. ``from_store``: parameters do although they are at
    home in memory."""
    offsets, offset = {}, 0
    for spec in segment.stored_planes:
        if spec.plane is Plane.PARAM and segment.home is not None and not from_store:
            continue
        offsets[spec.plane] = offset
        offset += round_up(numel * spec.itemsize, STAGING_ALIGN)
    return offsets


def start_reads(
    store: GenerationStore | None,
    segment: Segment,
    begin: int,
    end: int,
    staging: Block,
    offsets: dict[Plane, int],
    *,
    priority: Priority,
    version: int | None = None,
) -> list[TransferHandle]:
    """Begin to read elements [begin, end) of every plane but the parameters; ``version``: see GenerationStore.read. When one
    cannot begin nothing touches the buffer any more."""
    handles: list[TransferHandle] = []
    if store is None:
        return handles
    try:
        for spec in segment.stored_planes:
            if spec.plane is not Plane.PARAM:
                view = staging.view[offsets[spec.plane] :][: (end - begin) * spec.itemsize]
                where = begin * spec.itemsize
                handles.append(
                    store.read(segment.name, spec.plane, view, offset=where, priority=priority, version=version)
                )
    except BaseException:
        settle(handles)
        raise
    return handles


def settle(handles: Iterable[TransferHandle]) -> bool:
    """Return once none of the transfers touches its buffer any more; whether all went well."""
    succeeded = True
    for handle in handles:
        try:
            handle.wait()
        except (OSError, RuntimeError):
            succeeded = False
    return succeeded


def _sub_groups(order: Sequence[Segment], numel: int) -> Iterator[tuple[Segment, int, int]]:
    for segment in order:
        if segment.stored_planes:
            for begin in range(segment.numel_in_place, segment.layout.shard_numel, numel):
                yield segment, begin, min(begin + numel, segment.layout.shard_numel)

"""A training step as plain data: what the scheduler, the executor and the updater will have to do in it.

Built from a placement and a trace, or by hand; simulate.py runs it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lamina.tiers.placement.homes import Home, SegmentSize
from lamina.tiers.placement.placement import Placement
from lamina.tiers.schedule.trace import Access
from lamina.tiers.tier import Tier

MASTER_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class GroupModel:
    """What a fetch of one group costs. Bytes of this rank.

    ``window_bytes`` of the device tier are taken by it (0: it is used at home and never fetched), ``read_bytes`` come from
    NVMe, ``up_bytes`` go on over the link to a device, and the training thread takes ``gather_s`` once they are there.
    """

    name: str
    window_bytes: int = 0
    read_bytes: int = 0
    up_bytes: int = 0
    gather_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SubGroup:
    """One turn of the update pipeline: bytes from and to NVMe, and seconds of Adam on cores of its own.

    ``param_bytes`` of those read are parameters, which are not read while their group is fetched.
    """

    read_bytes: int = 0
    param_bytes: int = 0
    write_bytes: int = 0
    adam_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UpdateModel:
    """One segment's update.

    ``after``: the access whose compute ends with the gradient final; None: only the step's end starts it. ``streams``: it
    goes through update buffers. ``group``: whose fetched parameters it updates, -1 when they are not fetched. ``renews``: the
    copy of that group is in its reach, so that it takes the old parameters from there and writes the new ones there, too;
    else the copy is stale afterwards. ``gradient_bytes`` are taken while its gradient is open. ``late``: the step does not
    wait for it; the next fetch of its group does.
    """

    name: str
    sub_groups: tuple[SubGroup, ...]
    group: int = -1
    renews: bool = True
    after: int | None = None
    streams: bool = True
    gradient_bytes: int = 0
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """One step of one rank.

    ``accesses`` with their compute times (of cores or a device that do nothing else), ``updates`` in the order in which
    they are submitted. ``gradient_room_bytes``: None for as much as needed. ``shared_cores``: Adam and the passes compute on
    the same cores and slow each other down.
    """

    groups: tuple[GroupModel, ...]
    accesses: tuple[Access, ...]
    updates: tuple[UpdateModel, ...] = ()
    window_bytes: int = 0
    lookahead: int = 64
    buffer_count: int = 3
    buffer_bytes: int = 0
    gradient_room_bytes: int | None = None
    commit_s: float = 0.0
    shared_cores: bool = True
    fixed_device_bytes: int = 0
    """Held all the time: what is at home there."""
    fixed_host_bytes: int = 0

    def __post_init__(self) -> None:
        for access in self.accesses:
            if not 0 <= access.group < len(self.groups):
                raise ValueError(f"access of group {access.group}: there are {len(self.groups)} groups")
            if self.groups[access.group].window_bytes > self.window_bytes:
                raise ValueError(
                    f"{self.groups[access.group].name} needs {self.groups[access.group].window_bytes:,} bytes of a window "
                    f"of {self.window_bytes:,}: make the window larger or the group smaller"
                )
        for update in self.updates:
            if update.after is not None and not 0 <= update.after < len(self.accesses):
                raise ValueError(f"{update.name} is updated after access {update.after} of {len(self.accesses)}")
            if update.streams and update.sub_groups and self.buffer_count < 1:
                raise ValueError(f"{update.name} streams, but there are no update buffers: give buffer_count >= 1")
            room = self.gradient_room_bytes
            if room is not None and update.after is not None and update.gradient_bytes > room:
                raise ValueError(f"gradient of {update.name}: {update.gradient_bytes:,} bytes of {room:,}")

    @property
    def carried(self) -> frozenset[int]:
        """Groups whose copies outlive the step: no update makes them stale."""
        stale = {update.group for update in self.updates if not update.renews}
        return frozenset(range(len(self.groups))) - stale

    @property
    def early(self) -> bool:
        """Whether any update runs under the passes."""
        return any(update.after is not None or update.late for update in self.updates)


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Seconds of compute without any waiting. ``forward_s`` and ``backward_s`` by group, of one micro-batch.

    ``streamed_adam_elements_per_s``: of an update whose planes pass through buffers, since it takes their checksums, too; 0 for
    as fast as in memory.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    adam_elements_per_s: float
    streamed_adam_elements_per_s: float = 0.0
    commit_s: float = 0.0

    @classmethod
    def proportional(
        cls,
        segments: Sequence[SegmentSize],
        *,
        forward_s: float,
        backward_s: float,
        adam_elements_per_s: float,
        streamed_adam_elements_per_s: float = 0.0,
        commit_s: float = 0.0,
    ) -> "ComputeTimes":
        """Whole passes, shared out over the groups by their number of elements."""
        numels = group_numels(segments)
        total = sum(numels) or 1
        return cls(
            forward_s=[forward_s * numel / total for numel in numels],
            backward_s=[backward_s * numel / total for numel in numels],
            adam_elements_per_s=adam_elements_per_s,
            streamed_adam_elements_per_s=streamed_adam_elements_per_s,
            commit_s=commit_s,
        )


def group_numels(segments: Sequence[SegmentSize]) -> list[int]:
    """Elements of each group."""
    numels = [0] * (1 + max((segment.group for segment in segments), default=-1))
    for segment in segments:
        numels[segment.group] += segment.full_numel
    return numels


def model_step(
    segments: Sequence[SegmentSize],
    placement: Placement,
    times: ComputeTimes,
    *,
    micro_batches: int = 1,
    overlap_update: bool = False,
    retain_gradients: bool = True,
    window_bytes: int | None = None,
    host_budget: int | None = None,
    in_place_tiers: Sequence[Tier] = (Tier.DEVICE, Tier.HOST),
    separate_device: bool = False,
    lookahead: int = 64,
    order: Sequence[int] = (),
) -> StepModel:
    """A step under a placement. ``window_bytes``: the device tier's room for fetched groups, default what the placement
    counts; ``host_budget``: gradients may take what the other items leave of it; ``order``: groups as one micro-batch uses them,
    empty for all of them there and back."""
    groups = _groups(segments, placement, in_place_tiers, separate_device)
    accesses = _accesses(times, order) * micro_batches
    last = {access.group: index for index, access in enumerate(accesses)}
    end = len(accesses) - 1
    updates, kept_gradients = [], 0
    for segment in _in_update_order(segments):
        home = placement.homes[segment.name]
        early = overlap_update and home.state is Tier.NVME and not separate_device
        after, gradient = None, segment.shard_bytes(segment.grad_itemsize)
        if not early or retain_gradients or home.kept or home.late:
            kept_gradients += gradient
            gradient = 0
        if early and not home.late:
            after = last[segment.group] if segment.block else end
        if home.kept:  # what is in memory cannot be undone, so it waits for the step
            front = SubGroup(adam_s=home.kept / times.adam_elements_per_s)
            updates.append(UpdateModel(name=segment.name, sub_groups=(front,), streams=False))
        updates.append(
            UpdateModel(
                name=segment.name,
                sub_groups=_sub_groups(segment, home, placement.sub_group_numel, times),
                group=-1 if home.param in in_place_tiers or segment.persistent else segment.group,
                renews=home.param is Tier.NVME and not separate_device and not home.kept and not home.late,
                late=home.late,
                after=after,
                streams=Tier.NVME in (home.state, home.param),
                gradient_bytes=gradient,
            )
        )
    window = placement.device_items.get("window of fetched groups", 0)
    host_others = kept_gradients + sum(size for name, size in placement.host_items.items() if name != "gradients")
    largest = max((update.gradient_bytes for update in updates), default=0)
    updates.sort(key=lambda update: end + 1 + update.late if update.after is None else update.after)
    return StepModel(
        groups=tuple(groups),
        accesses=tuple(accesses),
        updates=tuple(updates),
        window_bytes=window if window_bytes is None else window_bytes,
        lookahead=lookahead,
        buffer_count=placement.staging_count,
        buffer_bytes=placement.host_items.get("update buffers", 0) // max(placement.staging_count, 1),
        gradient_room_bytes=None if host_budget is None else max(host_budget - host_others, largest),
        commit_s=times.commit_s if placement.nvme_bytes else 0.0,
        shared_cores=not separate_device,
        fixed_device_bytes=placement.device_bytes - window,
        fixed_host_bytes=host_others - placement.host_items.get("update buffers", 0),
    )


def _groups(
    segments: Sequence[SegmentSize], placement: Placement, in_place_tiers: Sequence[Tier], separate_device: bool
) -> list[GroupModel]:
    groups = [GroupModel(name=f"group {index}") for index in range(len(group_numels(segments)))]
    for segment in segments:
        tier = placement.homes[segment.name].param
        if tier in in_place_tiers or segment.persistent:
            continue
        before = groups[segment.group]
        shard = segment.shard_numel * segment.param_itemsize
        groups[segment.group] = replace(
            before,
            window_bytes=before.window_bytes + segment.full_bytes,
            read_bytes=before.read_bytes + (shard if tier is Tier.NVME else 0),
            up_bytes=before.up_bytes + (shard if separate_device else 0),
        )
    return groups


def _accesses(times: ComputeTimes, order: Sequence[int]) -> list[Access]:
    """One micro-batch. A group's first use is its forward pass; its backward pass is shared out over its other uses."""
    number = len(times.forward_s)
    order = order or [*range(number), *reversed(range(number))]
    uses, seen = Counter(order), set[int]()
    accesses = []
    for group in order:
        if group not in seen:
            seconds = times.forward_s[group] + (times.backward_s[group] if uses[group] == 1 else 0.0)
        else:
            seconds = times.backward_s[group] / (uses[group] - 1)
        seen.add(group)
        accesses.append(Access(group=group, compute_s=seconds))
    return accesses


def _in_update_order(segments: Sequence[SegmentSize]) -> list[SegmentSize]:
    return [segment for segment in segments if segment.trained]


def _sub_groups(segment: SegmentSize, home: Home, numel: int, times: ComputeTimes) -> tuple[SubGroup, ...]:
    """The turns of a segment's update, but for what is kept in memory of a state on NVMe; one without bytes where nothing of
    it is there."""
    state = sum(segment.state_itemsizes)
    if home.state is Tier.NVME:
        param_follows = len(segment.state_itemsizes) == 3 and segment.state_itemsizes[0] == MASTER_ITEMSIZE
        cached = home.param is not Tier.NVME or param_follows
        param = 0 if cached else segment.param_itemsize
        read, write = state + param, state + segment.param_itemsize
    elif home.param is Tier.NVME:
        param = read = write = segment.param_itemsize
    else:
        param = read = write = 0
    if not read and not write:
        return (SubGroup(adam_s=segment.shard_numel / times.adam_elements_per_s),)
    adam_rate = times.streamed_adam_elements_per_s or times.adam_elements_per_s
    cuts = [*range(home.kept, segment.shard_numel, max(numel, 1)), segment.shard_numel]
    return tuple(
        SubGroup(read_bytes=size * read, param_bytes=size * param, write_bytes=size * write, adam_s=size / adam_rate)
        for size in (end - begin for begin, end in pairwise(cuts))
    )

"""Re-plans while training: what a step measured corrects the model of the links; state and stripes move where that pays."""

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lamina.aio_native import DirectionStats, IOStats
from lamina.tiers import Alone, Choice, ComputeTimes, Measured, Placement, Replanner, Revision, SpaceError
from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.placement.stripe_balance import DeviceWork, StripeBalance
from lamina.zero import Ranks, ZeroRuntime

SETTLING_STEPS = 3
"""Steps after which the passes and the update count as measured; the first ones also warm caches up."""
MEMORY = 5
"""Steps that the seconds of the passes and of the update are the medians of."""
NOTES_KEPT = 50
CHANGED = 0.3
"""Change of these seconds, as a share, that is a reason to plan anew."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step computed, without waiting. Seconds; ``parameters`` is the number of elements updated."""

    forward_s: float
    backward_s: float
    adam_s: float
    commit_s: float
    parameters: int


@dataclass(kw_only=True)
class Steering:
    """One per engine. ``notes``: sentences about what was found and done, oldest first."""

    runtime: ZeroRuntime
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        choice = self.runtime.decision.choice
        self.replanner = Replanner(choice=choice) if choice is not None else None
        self._io_before = self.runtime.io_stats()
        store = self.runtime.store
        self._balance = StripeBalance(devices=store.devices) if store is not None else None
        self._work: deque[StepWork] = deque(maxlen=MEMORY)
        self._steps = 0
        self._pending: Choice | None = None
        self._room_bytes = 0  # for saved inputs, as far as it was seen to

    def after_step(self, work: StepWork) -> None:
        """Take one step's figures, between it and the next."""
        before, self._io_before = self._io_before, self.runtime.io_stats()
        if self.runtime.migration.under_way:
            return  # its transfers are not those of a usual step
        measured = self._measured(before, self._io_before)
        if self.replanner is None:
            return
        if self.runtime.residence.fixed is not None:
            if measured is not None:
                self.replanner.choice.question.links.observe(measured)
            return
        shared = slowest(self.runtime.ranks, measured, work)
        if shared is not None:
            self._replan(self.replanner, *shared)

    def _measured(self, before: IOStats | None, after: IOStats | None) -> Measured | None:
        """What this rank's disks did in the step; None where that says nothing about other steps."""
        if before is None or after is None or self._restriping(before, after):
            return None
        return disk_work(before, after)

    def _restriping(self, before: IOStats, after: IOStats) -> bool:
        """Let the stripes follow the disks; whether a change is under way. Stripes are a rank's own, so no other has to agree."""
        store, balance = self.runtime.store, self._balance
        if store is None or balance is None:
            return False
        settling = balance.settling
        weights = balance.after_step(device_work(before, after), store.shares)
        if weights is None:
            return settling
        paths = [path.path for path in self.runtime.options.nvme]
        wanted = ", ".join(f"{weight:.1%} on {path}" for path, weight in zip(paths, weights, strict=True))
        try:
            changed = store.restripe(weights)
        except SpaceError as error:
            self._note(f"the disks' rates ask for other stripes ({wanted}), but there is no room: {error}")
        else:
            told = "the coming generations are laid out so" if changed else "the paths' room allows no others"
            self._note(f"the disks' rates ask for other stripes ({wanted}): {told}")
        return True

    def _replan(self, replanner: Replanner, measured: Measured, work: StepWork) -> None:
        """Fed with the same figures, every rank decides the same."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if self.runtime.placement is pending.placement:
                replanner.adopt(pending)
                self.runtime.residence.decision = replace(self.runtime.decision, choice=pending)
                self._note("the state was moved")
            else:
                self._note(
                    "the placement stays: there was no room any more, on this rank or another, when it came to it"
                )
            return
        if self._make_room(replanner):
            return
        self._steps += 1
        self._work.append(work)
        revision = replanner.after_step(measured)
        times = self._new_times(replanner.choice)
        if times is not None:
            if revision is not None:
                self._note(str(revision))  # of two changes in one step both are told, and the second one decides
            revision = replanner.with_times(times)
        if revision is not None:
            self._act(replanner, revision)

    def _make_room(self, replanner: Replanner) -> bool:
        """Leave saved inputs the host memory that they have wanted so far; whether state is to move for that. Collective where
        they use what the placement leaves. See [Note: inputs without room] in saved_inputs.py."""
        runtime = self.runtime
        if not runtime.options.inputs_share_host:
            return False
        wanted = runtime.ranks.greatest(runtime.saved_inputs.wanted_bytes)
        if wanted <= self._room_bytes:
            return False
        self._room_bytes = wanted
        better = replanner.leave_room(wanted)
        set_aside = replanner.choice.question.wishes.saved_input_bytes
        told = f"saved inputs take {wanted:,} bytes of host memory, {set_aside:,} are set aside from now on"
        obstacle = None
        if better is not None or runtime.ranks.world_size > 1:  # with other budgets another rank may have to move
            obstacle = self._obstacle(better.placement if better is not None else runtime.placement)
        if obstacle is not None:
            told = f"saved inputs take {wanted:,} bytes of host memory; the placement stays: {obstacle}"
        self._note(f"{told}: state is moved for that" if better is not None and obstacle is None else told)
        runtime.residence.decision = replace(runtime.decision, choice=replanner.choice)
        if better is None or obstacle is not None:
            return False
        runtime.migration.begin(better.placement)
        self._pending = better
        return True

    def _act(self, replanner: Replanner, revision: Revision) -> None:
        self._note(str(revision))
        self.runtime.residence.decision = replace(self.runtime.decision, choice=replanner.choice)
        if revision.better is None:
            return
        obstacle = self._obstacle(revision.better.placement)
        if obstacle is not None:
            self._note(f"the placement stays: {obstacle}")
            return
        self.runtime.migration.begin(revision.better.placement)
        self._pending = revision.better

    def _obstacle(self, target: Placement) -> str | None:
        """What is in the way on any rank. Collective: one rank's obstacle holds all."""
        ranks = self.runtime.ranks
        homes = "".join(f"{name}: {home!r}; " for name, home in target.homes.items())
        mine = self.runtime.migration.obstacle(target) or ""
        found = [json.loads(text) for text in ranks.gather_texts(json.dumps([mine, homes]))]
        for rank, (obstacle, _) in enumerate(found):
            if obstacle:
                return f"{obstacle} (rank {rank})" if ranks.world_size > 1 else str(obstacle)
        if any(wanted != homes for _, wanted in found):
            return "the ranks would take different ones, since their budgets or paths differ"
        return None

    def _note(self, told: str) -> None:
        self.notes.append(told)
        del self.notes[:-NOTES_KEPT]

    def _new_times(self, choice: Choice) -> ComputeTimes | None:
        """The measured seconds of computing, when they differ from those that the choice reckons with."""
        if self._steps < SETTLING_STEPS:
            return None
        forward, backward, adam, commit = (
            statistics.median(getattr(work, name) for work in self._work)
            for name in ("forward_s", "backward_s", "adam_s", "commit_s")
        )
        parameters = statistics.median(work.parameters for work in self._work)
        before, question = choice.question.times, choice.question
        rate = parameters / adam if adam > 0 and parameters else before.adam_elements_per_s
        passes_before = (sum(before.forward_s) + sum(before.backward_s)) * question.micro_batches
        if not _differs(passes_before, forward + backward) and not _differs(before.adam_elements_per_s, rate):
            return None
        return ComputeTimes.proportional(
            question.segments,
            forward_s=forward / question.micro_batches,
            backward_s=backward / question.micro_batches,
            adam_elements_per_s=rate,
            commit_s=commit,
        )


def slowest(ranks: Ranks, measured: Measured | None, work: StepWork) -> tuple[Measured, StepWork] | None:
    """The figures of the slowest rank, which all wait for; None when no rank has measured anything. Collective: one small gather.

    A rank without a measurement of its disks (``None``) goes by the others'.
    """
    disk = _numbers(measured) if measured is not None else [0.0] * 6 + [-1.0]
    seconds = (work.forward_s, work.backward_s, work.adam_s, work.commit_s)
    rows = ranks.gather_numbers([*seconds, work.parameters, *disk], "comparing what a step took")
    busiest = max(rows, key=lambda row: row[-1])
    if busiest[-1] < 0:
        return None
    forward_s, backward_s, adam_s, commit_s, parameters = (max(row[column] for row in rows) for column in range(5))
    slowest_work = StepWork(
        forward_s=forward_s, backward_s=backward_s, adam_s=adam_s, commit_s=commit_s, parameters=int(parameters)
    )
    return _from_numbers(busiest[5:]), slowest_work


def _numbers(measured: Measured) -> list[float]:
    """What ranks compare of a measurement of their disks; the busy time comes last."""
    reads, writes = measured.reads_alone, measured.writes_alone
    alone = [reads.nbytes, reads.seconds, writes.nbytes, writes.seconds]
    return [measured.read_bytes, measured.written_bytes, *alone, measured.busy_s]


def _from_numbers(numbers: Sequence[float]) -> Measured:
    read_bytes, written_bytes, reads_alone, reads_alone_s, writes_alone, writes_alone_s, busy_s = numbers
    return Measured(
        link=DISK,
        read_bytes=int(read_bytes),
        written_bytes=int(written_bytes),
        busy_s=busy_s,
        reads_alone=Alone(nbytes=int(reads_alone), seconds=reads_alone_s),
        writes_alone=Alone(nbytes=int(writes_alone), seconds=writes_alone_s),
    )


def disk_work(before: IOStats, after: IOStats) -> Measured:
    """What all disks together did between two looks. They work side by side, so the busiest tells the time, and which part of
    the bytes went one way alone."""
    earlier = {device.device: device for device in before.devices}
    pairs = [(earlier.get(device.device), device) for device in after.devices]
    read_bytes, written_bytes = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    if not pairs:
        return Measured(link=DISK, read_bytes=read_bytes, written_bytes=written_bytes, busy_s=0.0)
    busy = [now.busy_s - (was.busy_s if was else 0.0) for was, now in pairs]
    busy_s = max(busy)
    was, now = pairs[busy.index(busy_s)]
    return Measured(
        link=DISK,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        busy_s=busy_s,
        reads_alone=_alone(was.read if was else None, now.read, read_bytes),
        writes_alone=_alone(was.write if was else None, now.write, written_bytes),
    )


def _alone(was: DirectionStats | None, now: DirectionStats, nbytes: int) -> Alone:
    """What went this way alone: by one device's counters, of so many bytes on all of them."""
    own = now.bytes - (was.bytes if was else 0)
    alone = now.alone_bytes - (was.alone_bytes if was else 0)
    seconds = now.alone_s - (was.alone_s if was else 0.0)
    return Alone(nbytes=nbytes * alone // own if own else 0, seconds=seconds)


def device_work(before: IOStats, after: IOStats) -> dict[int, DeviceWork]:
    """What each device (st_dev) did between two looks."""
    earlier = {device.device: device for device in before.devices}
    work = {}
    for device in after.devices:
        was = earlier.get(device.device)
        nbytes, busy = device.read.bytes + device.write.bytes, device.busy_s
        work[device.device] = DeviceWork(
            nbytes=nbytes - (was.read.bytes + was.write.bytes if was else 0), busy_s=busy - (was.busy_s if was else 0.0)
        )
    return work


def _differs(before: float, now: float) -> bool:
    return abs(now - before) > CHANGED * max(before, now)

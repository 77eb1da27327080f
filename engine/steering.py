"""Re-plans while training: what a step measured corrects the model of the links, and state moves where that pays."""

import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from lamina.aio_native import IOStats
from lamina.tiers import Choice, ComputeTimes, Measured, Replanner, Revision
from lamina.tiers.bandwidth import DISK
from lamina.zero import ZeroRuntime

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
        self._io_before = self._io()
        self._work: deque[StepWork] = deque(maxlen=MEMORY)
        self._steps = 0
        self._pending: Choice | None = None

    def after_step(self, work: StepWork) -> None:
        """Take one step's figures, between it and the next."""
        replanner, io = self.replanner, self._io()
        if replanner is None or io is None or self._io_before is None:
            return
        measured, self._io_before = disk_work(self._io_before, io), io
        if not self.runtime.can_move:
            replanner.choice.question.links.observe(measured)
            return
        if self.runtime.migration.under_way:
            return  # its transfers are not those of a usual step
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if self.runtime.placement is pending.placement:
                replanner.adopt(pending)
                self.runtime.decision = replace(self.runtime.decision, choice=pending)
                self._note("the state was moved")
            else:
                self._note("the placement stays: the disk has no room for files that hold more")
            return
        self._steps += 1
        self._work.append(work)
        revision = replanner.after_step(measured)
        times = self._new_times(replanner.choice)
        if times is not None:
            revision = replanner.with_times(times)
        if revision is not None:
            self._act(replanner, revision)

    def _act(self, replanner: Replanner, revision: Revision) -> None:
        self._note(str(revision))
        self.runtime.decision = replace(self.runtime.decision, choice=replanner.choice)
        if revision.better is None:
            return
        obstacle = self.runtime.migration.obstacle(revision.better.placement)
        if obstacle is not None:
            self._note(f"the placement stays: {obstacle}")
            return
        self.runtime.migration.begin(revision.better.placement)
        self._pending = revision.better

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

    def _io(self) -> IOStats | None:
        return self.runtime.io.stats() if self.runtime.io is not None else None


def disk_work(before: IOStats, after: IOStats) -> Measured:
    """What all disks together did between two looks. They work side by side, so the busiest tells the time."""
    earlier = {device.device: device.busy_s for device in before.devices}
    busy = [device.busy_s - earlier.get(device.device, 0.0) for device in after.devices]
    return Measured(
        link=DISK,
        read_bytes=after.bytes_read - before.bytes_read,
        written_bytes=after.bytes_written - before.bytes_written,
        busy_s=max(busy, default=0.0),
    )


def _differs(before: float, now: float) -> bool:
    return abs(now - before) > CHANGED * max(before, now)

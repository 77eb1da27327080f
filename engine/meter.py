"""Measures steps: the engine's clock, and the counters of the layers below, put together into StepMetrics."""

import os
import time
from dataclasses import dataclass

from lamina.tiers import Measured, Tier
from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.schedule.spans import STEP
from lamina.zero import ZeroRuntime
from lamina.zero.step.update import ROOM

from .metrics import StepCosts, StepMetrics
from .steering import Steering, StepWork, disk_work


@dataclass(kw_only=True)
class Clock:
    """Seconds since the last optimizer step, by phase."""

    began: float
    processor_s: float
    """Processor time of this process, all threads, when it began."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_computed_s: float = 0.0
    """Of those, without waiting."""
    backward_computed_s: float = 0.0
    waited_s: float = 0.0
    """When the last pass ended; see ``StepMeter._waited``."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the engine knows of a step and the counters do not."""

    step: int
    lr: float
    loss_scale: float
    skipped: bool
    grad_norm: float
    update_s: float
    commit_s: float
    loss: float | None = None


class StepMeter:
    """One per engine. Times in seconds."""

    def __init__(self, runtime: ZeroRuntime) -> None:
        self.clock = Clock(began=time.perf_counter(), processor_s=time.process_time())
        self._runtime = runtime
        links = runtime.decision.links
        self._disks = tuple(zip(links.disks, links.disk_shares, strict=True))
        self._io_before = self._runtime.io_stats()
        self.steering = Steering(runtime=runtime)

    def forward_took(self, began: float) -> None:
        """A forward pass that began then has just ended."""
        now = time.perf_counter()
        self.clock.forward_s += now - began
        self.clock.forward_computed_s += max(0.0, now - began - self._waited())
        self._runtime.spans.add("compute", "forward", began, now)

    def backward_took(self, began: float) -> None:
        """A backward pass that began then has just ended."""
        now = time.perf_counter()
        self.clock.backward_s += now - began
        self.clock.backward_computed_s += max(0.0, now - began - self._waited())
        self._runtime.spans.add("compute", "backward", began, now)

    def _waited(self) -> float:
        """What the training thread waited for transfers, for memory and for updates' kernels since this was last asked."""
        runtime = self._runtime
        stalled = runtime.executor.counters.stalled_s + runtime.updater.counters.room_stall_s if runtime.store else 0.0
        before, self.clock.waited_s = self.clock.waited_s, stalled + runtime.updater.turns.taken_s
        return self.clock.waited_s - before

    def _take_disk_work(self) -> Measured:
        """What the disks did since this was last asked."""
        before, now = self._io_before, self._runtime.io_stats()
        self._io_before = now
        if before is None or now is None:
            return Measured(link=DISK, read_bytes=0, written_bytes=0, busy_s=0.0)
        return disk_work(before, now)

    def take(self, facts: StepFacts) -> StepMetrics:
        """The metrics of the step that ends now; the next one's clock starts."""
        runtime = self._runtime
        processor_s = time.process_time()  # before the clock: no core has computed for longer than the step took
        now = time.perf_counter()
        clock = self.clock
        self.clock = Clock(began=now, processor_s=time.process_time(), waited_s=runtime.updater.turns.taken_s)
        step_s = now - clock.began
        runtime.spans.add(STEP, f"{STEP} {facts.step}", clock.began, now)
        disk = self._take_disk_work()
        fetches, update = runtime.executor.take_counters(), runtime.updater.take_counters()
        fetched = fetches.fetched_bytes
        stalled = {"nvme->host": fetches.stalled_s, ROOM: update.room_stall_s} if runtime.store else {}
        costs = StepCosts(
            compute_s=clock.forward_computed_s + clock.backward_computed_s,
            adam_s=update.adam_s,
            forward_backward_io_s=self._io_seconds(fetched, 0),
            update_io_s=self._io_seconds(max(0, disk.read_bytes - fetched), disk.written_bytes),
            ahead_io_s=self._io_seconds(update.ahead_bytes, 0),
            late_io_s=self._io_seconds(0, update.late_bytes),
            cores_s=(processor_s - clock.processor_s) / len(os.sched_getaffinity(0)),
            busy_io_s=min(disk.busy_s, step_s),
            barrier=not runtime.early_segments,
            shared_cores=runtime.options.accelerator is None,
        )
        if not facts.skipped:
            self._steer(clock, costs, update.parameters, facts)
        links = {"nvme->host": disk.read_bytes, "host->nvme": disk.written_bytes} if runtime.store else {}
        return StepMetrics(
            step=facts.step,
            step_s=step_s,
            forward_s=clock.forward_s,
            backward_s=clock.backward_s,
            update_s=facts.update_s,
            commit_s=facts.commit_s,
            communication_share=runtime.ranks.take_seconds() / step_s,
            stalled_s=stalled,
            link_bytes=links,
            link_gbps={link: nbytes / step_s / 1e9 for link, nbytes in links.items()},
            peak_bytes={
                str(Tier.DEVICE): runtime.device.peak,
                str(Tier.HOST): runtime.host.peak + runtime.placement.own_bytes,
                str(Tier.NVME): runtime.placement.nvme_bytes + runtime.saved_inputs.file_bytes,
            },
            nvme_written_bytes=self._io_before.bytes_written if self._io_before is not None else 0,
            lower_bound_s=costs.lower_bound_s,
            costs=costs,
            grad_norm=facts.grad_norm,
            lr=facts.lr,
            loss_scale=facts.loss_scale,
            skipped=facts.skipped,
            loss=facts.loss,
        )

    def _steer(self, clock: Clock, costs: StepCosts, parameters: int, facts: StepFacts) -> None:
        self.steering.after_step(
            StepWork(
                forward_s=clock.forward_computed_s,
                backward_s=clock.backward_computed_s,
                adam_s=costs.adam_s,
                commit_s=facts.commit_s,
                parameters=parameters,
            )
        )

    def _io_seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Time of these bytes on the disks, which share them as the stripes do."""
        times = (disk.seconds(int(read_bytes * share), int(written_bytes * share)) for disk, share in self._disks)
        return max(times, default=0.0)

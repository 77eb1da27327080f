"""Runs a step model without doing it: the same scheduler, the executor's and the updater's rules, simulated time.

Event-driven. Two threads as in reality (training and update), a disk, the way to a device, and cores. Steps are
repeated so that the last one starts where the one before it ended.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.aio_native import Priority
from lamina.tiers.links.bandwidth import DISK, TO_DEVICE, BandwidthModel
from lamina.tiers.links.mix import mixed_seconds
from lamina.tiers.schedule.lookahead import EarlyUpdate, Pace, Timetable
from lamina.tiers.schedule.plan import Action, Verb
from lamina.tiers.schedule.scheduler import DeviceState, Scheduler
from lamina.tiers.schedule.spans import STEP, Spans
from lamina.tiers.schedule.trace import Access, Order, Upcoming

from .event_queue import Channel, EventQueue, Process, Signal
from .simulated_update import PASSES, READ, SimulatedUpdater
from .step_model import StepModel, UpdateModel

COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a group: when it was asked for, when its fetch was complete, when compute began and ended."""

    group: int
    asked: float
    arrived: float
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What the last simulated step did. Seconds and bytes of one rank.

    ``busy_s`` and ``idle_s`` by channel (``nvme``, ``host->device``, ``compute``); ``stalled_s`` by what the training thread
    waited for. ``lower_bound_s`` is that of DESIGN section 7 for the bytes that were moved.
    """

    step_s: float
    passes_s: float
    update_s: float
    busy_s: Mapping[str, float]
    idle_s: Mapping[str, float]
    stalled_s: Mapping[str, float]
    read_bytes: int
    written_bytes: int
    fetches: int
    peak_bytes: Mapping[str, int]
    peak_window_bytes: int
    peak_ahead_bytes: int
    """The most of the window that was held for uses to come: fetched or being fetched in this step, and not yet used."""
    lower_bound_s: float
    barrier_bound_s: float
    kept: tuple[int, ...] = ()
    """Groups whose copies were kept from the step before."""
    actions: tuple[Action, ...] = ()
    uses: tuple[Use, ...] = ()
    spans: Spans = field(default_factory=Spans)

    @property
    def ratio(self) -> float:
        """Step time over its lower bound."""
        return self.step_s / self.lower_bound_s if self.lower_bound_s else 1.0

    @property
    def binding(self) -> str:
        """The channel that was busy longest."""
        return max(self.busy_s, key=lambda name: self.busy_s[name], default="")

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON, without the single uses."""
        moved = ("read_bytes", "written_bytes", "fetches", "peak_bytes", "peak_window_bytes", "peak_ahead_bytes")
        times = ("step_s", "passes_s", "update_s", "busy_s", "idle_s", "stalled_s", "lower_bound_s", "barrier_bound_s")
        names = (*times, *moved)
        return {name: getattr(self, name) for name in names} | {"ratio": self.ratio, "binding": self.binding}


def simulate(
    step: StepModel, links: BandwidthModel, *, steps: int = 2, record: bool = False, timetable: bool = True
) -> Simulation:
    """The last of ``steps`` steps in a row. ``record``: with every use, action and span (for tests and pictures).
    ``timetable``: fetch just early enough (lookahead.py), as an executor does that knows the links; else as early as can be.

    Raises KeyError when a link that the step uses is not in the model, RuntimeError when a step could never end (our own fault).
    """
    machine = _Machine(step, links, record=record, timetable=timetable)
    machine.queue.start(machine.updater.run())
    training = machine.queue.start(machine.train(steps))
    machine.queue.run()
    if not training.fired or machine.result is None:
        raise RuntimeError(f"the simulated step stands still at {machine.queue.now:.6f} s: {machine.state()}")
    return machine.result


def simulate_ranks(ranks: Sequence[StepModel], links: BandwidthModel) -> Simulation:
    """The slowest of all ranks: they wait for each other at every gather. Ranks that do the same are simulated once.

    ``links`` are those of one rank (see ``Link.sharers``). Raises ValueError without ranks.
    """
    if not ranks:
        raise ValueError("no ranks to simulate: give at least one")
    return max((simulate(step, links) for step in dict.fromkeys(ranks)), key=lambda done: done.step_s)


@dataclass(kw_only=True, slots=True)
class _Seat:
    nbytes: int
    arrival: Signal
    started: float
    dirty: bool = False  # an update writes into it
    fetched: bool = True  # in this step, or ahead of it; else kept from the one before
    used: bool = False


@dataclass(kw_only=True)
class _Totals:
    """What the current step has done so far."""

    began: float = 0.0
    passes_ended: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    stalled: dict[str, float] = field(default_factory=dict)
    fetched_bytes: int = 0
    up_bytes: int = 0
    compute_s: float = 0.0
    fetches: int = 0
    kept: tuple[int, ...] = ()
    actions: list[Action] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    peak_window: int = 0
    peak_ahead: int = 0
    peak_buffers: int = 0
    peak_gradients: int = 0

    def stall(self, what: str, seconds: float) -> None:
        if seconds > 0:
            self.stalled[what] = self.stalled.get(what, 0.0) + seconds


class _Machine:
    """Everything that runs in one simulation."""

    def __init__(self, step: StepModel, links: BandwidthModel, *, record: bool, timetable: bool) -> None:
        self.step = step
        self.record = record
        self.spans = Spans(enabled=record)
        self.queue = EventQueue()
        self.links = links
        uses_disk = any(group.read_bytes for group in step.groups) or any(
            part.read_bytes or part.write_bytes for update in step.updates for part in update.sub_groups
        )
        self.disk = links.link(DISK) if uses_disk else None
        gain = self.disk.mix_gain if self.disk is not None else 1.0
        self.disk_channel = Channel(queue=self.queue, pace_together=gain / 2, one_lane=gain == 1)
        self.up = links.link(TO_DEVICE) if any(group.up_bytes for group in step.groups) else None
        self.up_channel = Channel(queue=self.queue)
        self.cores = Channel(queue=self.queue, pace_together=0.5 if step.shared_cores else 1.0)
        self.scheduler = Scheduler(sizes=[group.window_bytes for group in step.groups], lookahead=step.lookahead)
        self.order = Order(
            (access.group for access in step.accesses if step.groups[access.group].window_bytes), step.carried
        )
        self.timetable = self._timetable() if timetable else None
        self.position = -1
        self.seats: dict[int, _Seat] = {}
        self.held = 0
        self.current = -1
        self.totals = _Totals()
        self.result: Simulation | None = None
        self.updater = SimulatedUpdater(
            queue=self.queue,
            disk=self.disk,
            disk_channel=self.disk_channel,
            cores=self.cores,
            spans=self.spans,
            buffer_count=step.buffer_count,
            computed=self._release_gradient,
            has_copy=self._has_copy,
            renew=self._renew,
        )
        self._landed = self._nothing_to_land()
        self._copies: dict[int, _Seat | None] = {}
        self.open_gradients = 0
        self._early: dict[int, list[UpdateModel]] = {}
        for update in step.updates:
            if update.after is not None:
                self._early.setdefault(update.after, []).append(update)
        self._at_end = [update for update in step.updates if update.after is None and not update.late]
        self._late = [update for update in step.updates if update.late]
        self._late_written: dict[int, Signal] = {}

    def _timetable(self) -> Timetable | None:
        """Of the accesses that are fetched for; in between, the others compute."""
        step = self.step
        early = [part for update in step.updates if update.after is not None for part in update.sub_groups]
        pace = Pace.of(
            self.links,
            [group.read_bytes for group in step.groups],
            [group.up_bytes for group in step.groups],
            EarlyUpdate(
                read_bytes=sum(part.read_bytes for part in early),
                written_bytes=sum(part.write_bytes for part in early),
                buffer_bytes=step.buffer_count * step.buffer_bytes if early else 0,
            ),
        )
        fetched: list[Access] = []
        for access in step.accesses:
            if step.groups[access.group].window_bytes:
                fetched.append(access)
            elif fetched:
                last = fetched[-1]
                fetched[-1] = Access(group=last.group, compute_s=last.compute_s + access.compute_s)
        return Timetable(fetched, pace) if pace is not None else None

    def _nothing_to_land(self) -> Signal:
        landed = Signal()
        landed.fire(self.queue.now)
        return landed

    def state(self) -> str:
        """For an error: who holds what."""
        return f"access {self.position}, {self.held:,} bytes held, {self.open_gradients:,} of gradients open"

    # -- the training thread -------------------------------------------------------------------------------------

    def train(self, steps: int) -> Process:
        self._prefetch()
        for step in range(1, steps + 1):
            self._begin_step()
            for index, access in enumerate(self.step.accesses):
                asked = self.queue.now
                yield from self._acquire(access.group)
                for update in self._early.get(index, ()):
                    yield from self._gradient_room(update)
                began = self.queue.now
                seat = self.seats.get(access.group)
                self.totals.compute_s += access.compute_s
                yield self.cores.serve(PASSES, access.compute_s)
                self._note_use(access.group, asked, seat, began)
                for update in self._early.get(index, ()):
                    yield from self._submit(update)
            self.totals.passes_ended = self.queue.now
            for update in self._at_end:
                self.open_gradients += update.gradient_bytes
                yield from self._submit(update)
            self.totals.peak_gradients = max(self.totals.peak_gradients, self.open_gradients)
            yield from self.updater.finish()
            for update in self._late:
                yield from self._submit(update)
                self._late_written[update.group] = self.queue.start(self.updater.written(update))
            self._landed = self.queue.start(self._land(step))
            yield from self._settle_copies()
            self.result = self._finish()
            self.spans.add(STEP, f"{STEP} {step}", self.totals.began, self.queue.now)
            self.updater.read_ahead()
            self._prefetch()
        yield self._landed
        self.updater.stop()

    def _land(self, step: int) -> Process:
        """The last writes of a step and its commit: see tiers/nvme/landing.py."""
        for update in self._late:
            yield self._late_written[update.group]
        yield from self.updater.last_writes()
        if self.step.commit_s:
            began = self.queue.now
            yield self.queue.after(self.step.commit_s)
            self.spans.add("commit", f"{STEP} {step}", began, self.queue.now)

    def _begin_step(self) -> None:
        self.totals = _Totals(began=self.queue.now)
        self.totals.kept = tuple(group for group, seat in self.seats.items() if not seat.fetched)
        for group, seat in self.seats.items():
            if seat.fetched:  # ahead, between the steps
                self._count_fetch(group)
        self.totals.peak_window = self.held
        self._note_ahead()
        self.totals.busy = {name: channel.busy_s for name, channel in self._channels()}
        self.updater.begin_step()

    def _acquire(self, group: int) -> Process:
        if not self.step.groups[group].window_bytes:
            return
        asked = self.queue.now
        self.position = (self.position + 1) % len(self.order.groups)
        self.current = group
        if group in self.seats and self.seats[group].dirty:  # ahead of what counts: see executor.py
            self._evict(group)
        if group not in self.seats:
            yield from self._make_room(group)
            self._fetch(group, Priority.DEMAND)
        yield self.seats[group].arrival
        self.seats[group].used = True
        self.totals.stall(DISK if self.step.groups[group].read_bytes else TO_DEVICE, self.queue.now - asked)
        self.spans.add("stall", self.step.groups[group].name, asked, self.queue.now)
        gather = self.step.groups[group].gather_s
        if gather:
            yield self.queue.after(gather)
            self.totals.stall("gather", gather)
        self._prefetch()

    def _gradient_room(self, update: UpdateModel) -> Process:
        """Wait until the gradient fits beside those that are open."""
        asked, room = self.queue.now, self.step.gradient_room_bytes
        while room is not None and self.open_gradients + update.gradient_bytes > room and self.updater.open_jobs:
            yield self.updater.next_job_done()
        self.open_gradients += update.gradient_bytes
        self.totals.peak_gradients = max(self.totals.peak_gradients, self.open_gradients)
        self.totals.stall("gradient room", self.queue.now - asked)
        self.spans.add("stall", f"gradient room for {update.name}", asked, self.queue.now)

    def _release_gradient(self, update: UpdateModel) -> None:
        self.open_gradients -= update.gradient_bytes

    def _note_use(self, group: int, asked: float, seat: _Seat | None, began: float) -> None:
        if self.record:
            arrived = seat.arrival.at if seat is not None and seat.arrival.at is not None else began
            self.totals.uses.append(Use(group=group, asked=asked, arrived=arrived, began=began, ended=self.queue.now))
            self.spans.add(COMPUTE, self.step.groups[group].name, began, self.queue.now)

    # -- the device tier -----------------------------------------------------------------------------------------

    def _upcoming(self) -> Upcoming:
        return Upcoming(self.order, self.position + 1)

    def _busy(self) -> set[int]:
        return {group for group, seat in self.seats.items() if group == self.current or not seat.arrival.fired}

    def _prefetch(self) -> None:
        if not self.order.groups:
            return
        state = DeviceState(
            held={group: seat.nbytes for group, seat in self.seats.items()},
            busy=self._busy(),
            capacity_bytes=self.step.window_bytes,
            current=self.current,
        )
        reach = self.timetable.reach(self.position) if self.timetable is not None else None
        for action in self.scheduler.prefetch(state, self._upcoming(), reach=reach):
            if action.verb is Verb.EVICT:
                self._evict(action.group)
            else:
                self._fetch(action.group, Priority.PREFETCH)

    def _fetch(self, group: int, priority: Priority) -> None:
        model = self.step.groups[group]
        seat = _Seat(nbytes=model.window_bytes, arrival=Signal(), started=self.queue.now)
        self.seats[group] = seat
        self.held += seat.nbytes
        self.totals.peak_window = max(self.totals.peak_window, self.held)
        self._note_ahead()
        self._count_fetch(group)
        self.queue.start(self._transfer(group, seat, priority))

    def _note_ahead(self) -> None:
        ahead = sum(seat.nbytes for seat in self.seats.values() if seat.fetched and not seat.used)
        self.totals.peak_ahead = max(self.totals.peak_ahead, ahead)

    def _count_fetch(self, group: int) -> None:
        self.totals.fetches += 1
        self.totals.fetched_bytes += self.step.groups[group].read_bytes
        self.totals.up_bytes += self.step.groups[group].up_bytes
        if self.record:
            self.totals.actions.append(Action(Verb.FETCH, group))

    def _transfer(self, group: int, seat: _Seat, priority: Priority) -> Process:
        model = self.step.groups[group]
        if group in self._late_written:
            yield self._late_written[group]
        if model.read_bytes and self.disk is not None:
            seconds, latency = self.disk.read_s(model.read_bytes), self.disk.read.latency_s
            yield self.disk_channel.serve(READ, seconds, priority=priority, latency_s=latency)
        if model.up_bytes and self.up is not None:
            yield self.up_channel.serve(READ, self.up.read_s(model.up_bytes), latency_s=self.up.read.latency_s)
        self.spans.add(
            "nvme->host: parameters" if model.read_bytes else TO_DEVICE, model.name, seat.started, self.queue.now
        )
        seat.arrival.fire(self.queue.now)

    def _evict(self, group: int) -> None:
        self.held -= self.seats.pop(group).nbytes
        if self.record:
            self.totals.actions.append(Action(Verb.EVICT, group))

    def _make_room(self, group: int) -> Process:
        """Evict idle groups, furthest next use first; then give up prefetches that came too early."""
        upcoming = self._upcoming()
        wanted = self.step.groups[group].window_bytes
        while self.held + wanted > self.step.window_bytes:
            busy = self._busy()
            idle = [other for other in self.seats if other not in busy]
            candidates = idle or [other for other in self.seats if other != group]
            victim = max(candidates, key=lambda other: (upcoming.next_use(other), other))
            yield self.seats[victim].arrival  # the memory is free only once nothing writes to it
            self._evict(victim)

    # -- copies and updates: [Note: renewed copies] in executor.py -------------------------------------------------

    def _submit(self, update: UpdateModel) -> Process:
        if update.streams:
            yield self._landed
        seat = self.seats.get(update.group) if update.renews else None
        if seat is not None and not seat.arrival.fired:
            seat = None
        if seat is not None:
            seat.dirty = True
        self._copies[id(update)] = seat
        self.updater.submit(update)

    def _has_copy(self, update: UpdateModel) -> bool:
        """Whether old parameters can be taken from a copy: any that is there, unless it is out of reach."""
        seat = self.seats.get(update.group) if update.renews else None
        return seat is not None and seat.arrival.fired

    def _renew(self, update: UpdateModel) -> None:
        """New parameters are written into the copy, if it is still the one that was there when the update was asked for."""
        if not update.late and self._copies[id(update)] is not self.seats.get(update.group):
            self._copies[id(update)] = None

    def _settle_copies(self) -> Process:
        """After the commit: drop what is stale, keep the rest."""
        for update in self.step.updates:
            seat = self.seats.get(update.group)
            if seat is not None and self._copies[id(update)] is not seat:
                yield seat.arrival
                self._evict(update.group)
        for seat in self.seats.values():
            seat.dirty = seat.fetched = False
        self._copies.clear()
        self.current, self.position = -1, -1

    # -- the outcome -----------------------------------------------------------------------------------------------

    def _channels(self) -> Iterator[tuple[str, Channel]]:
        if self.disk is not None:
            yield DISK, self.disk_channel
        if self.up is not None:
            yield TO_DEVICE, self.up_channel
        yield COMPUTE, self.cores

    def _finish(self) -> Simulation:
        totals, updater = self.totals, self.updater
        step_s = self.queue.now - totals.began
        busy = {name: channel.busy_s - totals.busy[name] for name, channel in self._channels()}
        bound, barrier_bound = self._bounds()
        return Simulation(
            step_s=step_s,
            passes_s=totals.passes_ended - totals.began,
            update_s=self.queue.now - totals.passes_ended,
            busy_s=busy,
            idle_s={name: step_s - seconds for name, seconds in busy.items()},
            stalled_s=dict(totals.stalled),
            read_bytes=totals.fetched_bytes + updater.read_bytes,
            written_bytes=updater.written_bytes,
            fetches=totals.fetches,
            peak_bytes={
                "device": self.step.fixed_device_bytes + totals.peak_window,
                "host": self.step.fixed_host_bytes
                + self.step.buffer_bytes * self.step.buffer_count
                + totals.peak_gradients,
            },
            peak_window_bytes=totals.peak_window,
            peak_ahead_bytes=totals.peak_ahead,
            lower_bound_s=bound,
            barrier_bound_s=barrier_bound,
            kept=totals.kept,
            actions=tuple(totals.actions),
            uses=tuple(totals.uses),
            spans=self.spans,
        )

    def _bounds(self) -> tuple[float, float]:
        """Least time for the bytes that were moved: as this step may overlap, and with an update barrier."""
        totals, updater = self.totals, self.updater
        fetch = self.disk.read_s(totals.fetched_bytes) if self.disk is not None else 0.0
        up = self.up.read_s(totals.up_bytes) if self.up is not None else 0.0
        read = write = beside_read = beside_write = 0.0  # beside the update: ahead of it, and late
        gain = 1.0
        if self.disk is not None:
            read, write = self.disk.read_s(updater.read_bytes), self.disk.write_s(updater.written_bytes)
            beside_read, beside_write = self.disk.read_s(updater.ahead_bytes), self.disk.write_s(updater.late_bytes)
            gain = self.disk.mix_gain
        rest = mixed_seconds(max(0.0, read - beside_read), max(0.0, write - beside_write), gain)
        apart = max(totals.compute_s, fetch, up) + max(updater.adam_s, rest)
        barrier = max(apart, mixed_seconds(fetch + read, write, gain))
        if not self.step.early:
            return barrier, barrier
        both = totals.compute_s + updater.adam_s
        compute = both if self.step.shared_cores else max(totals.compute_s, updater.adam_s)
        return max(compute, mixed_seconds(fetch + read, write, gain), up), barrier

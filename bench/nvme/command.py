"""`lamina nvme`: from the options to the report."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lamina.aio_native import AsyncIO, AsyncIOError
from lamina.bench.given_path import check_target
from lamina.bench.interrupt import Interrupt
from lamina.bench.report import ProgressLine, Reporter
from lamina.tiers.links.profile_file import save_profile

from .args import Options, parse
from .budget import TORCH_S, Allowance, OutOfTime, divide
from .fleet import Fleet
from .gather import GatherError, all_gather_rate
from .outcome import Outcome
from .points import Space, Workload
from .result import as_result, build_profile
from .session import FLEET_ROUNDS, SHORTEST_S, Session, Watch, run_fleet
from .show import print_outcome
from .space import SpaceError, buffer_bytes

PROGRESS_STEPS = 100
KEPT = 0.96
"""Share of the time that is planned; the rest is for what takes longer, and for the report."""
LEAST_DEADLINE_S = 20.0
"""Runs shorter than this may take until then: some parts take their time however little they are given."""
END_S = 1.0
"""Kept for removing the files and for the report."""
PROCESS_START_S = 0.5
GATHER_TIMEOUT_S = 60.0
GATHER_LEAST_S = 5.0
NO_TIME = "the time was over: give more --seconds"


def main(arguments: Sequence[str]) -> int:
    """Run `lamina nvme ARGUMENTS`; returns the exit code.

    Raises ValueError and OSError for paths, sizes and options that cannot be used.
    """
    began = time.perf_counter()
    options = parse(arguments)
    report = Reporter(as_json=options.json)
    machine = report.machine()
    draw = _drawing(options)
    if options.save_as is not None:
        check_target("--save-as", options.save_as)
    with Interrupt() as interrupt, _hang_up_is_a_stop():
        outcome = _measure(options, report, interrupt, began)
    print_outcome(report, options, outcome)
    result = as_result(options, machine, outcome)
    result["profile"] = _save(options, report, machine, outcome)
    if draw is not None and options.plot is not None:
        draw(outcome, options.plot)
        report.line(f"picture: {options.plot}")
    report.json(result)
    return 0


@contextlib.contextmanager
def _hang_up_is_a_stop() -> Iterator[None]:
    """A closed terminal stops the run like SIGTERM, so that its files are removed; under nohup it is ignored."""
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _drawing(options: Options) -> Callable[[Outcome, Path], None] | None:
    """What draws the picture, imported before an hour of measuring and not after. Raises ValueError without matplotlib."""
    if options.plot is None:
        return None
    check_target("--plot", options.plot)
    try:
        # Here: matplotlib is optional, and takes a second to import.
        from .picture import check_ending, draw
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'lamina[plot]'") from error
    check_ending(options.plot)
    return draw


class _Bar:
    """Progress as the share of the run's time that is over."""

    def __init__(self, allowance: Allowance, progress: ProgressLine) -> None:
        self._allowance, self._progress, self._steps = allowance, progress, 0

    def told(self, text: str) -> None:
        """Move the bar to where the clock is."""
        steps = int(PROGRESS_STEPS * self._allowance.share)
        for _ in range(steps - self._steps):
            self._progress.advance(text)
        self._steps = max(self._steps, steps)


def find_space(options: Options) -> Space:
    """The points that can be tried here. Raises ValueError, and OSError when no backend that was asked for works."""
    buffers = buffer_bytes(max(options.blocks), max(options.depths), options.buffer_bytes)
    per_file = options.size_bytes // max(options.files)
    if min(options.blocks) > per_file:
        raise SpaceError(
            f"--size leaves {per_file} bytes for each of {max(options.files)} files, less than a block: "
            "give a larger --size, fewer --files or smaller --block-sizes"
        )
    return Space(
        backends=usable_backends(options.backends),
        blocks=tuple(block for block in options.blocks if block <= per_file),
        depths=options.depths,
        files=options.files,
        max_inflight_bytes=buffers,
        workloads=options.workloads,
    )


def usable_backends(asked: Sequence[str] | None) -> tuple[str, ...]:
    """All backends that start here; those that were asked for must. Raises BackendUnavailableError with the reason."""
    if asked is not None:
        for name in asked:
            AsyncIO(backend=name, queue_depth=2).close()  # type: ignore[arg-type]
        return tuple(asked)
    usable = []
    for name in ("uring", "threads"):
        with contextlib.suppress(AsyncIOError):
            AsyncIO(backend=name, queue_depth=2).close()  # type: ignore[arg-type]
            usable.append(name)
    if not usable:
        AsyncIO(queue_depth=2).close()  # raises, and says why
    return tuple(usable)


def _measure(options: Options, report: Reporter, interrupt: Interrupt, began: float) -> Outcome:
    """All that was asked for, within the time."""
    space = find_space(options)
    seconds = KEPT * options.seconds
    parts = divide(
        seconds,
        paths=len(options.paths),
        size_bytes=options.size_bytes,
        processes=options.processes,
        fio=options.fio,
        extras=options.extras,
        insist_on_gather=options.extras_given,
    )
    deadline_s = max(LEAST_DEADLINE_S, options.seconds) - END_S
    allowance = Allowance(parts, seconds, time.perf_counter, began=began, deadline_s=deadline_s)
    with report.progress(PROGRESS_STEPS, title="nvme") as progress, contextlib.ExitStack() as stack:
        watch = Watch(interrupted=interrupt.check, told=_Bar(allowance, progress).told, time=allowance)
        sessions = []
        for path in options.paths:
            session = stack.enter_context(Session(path, options, space, watch))
            sessions.append(session)
            session.measure()
        outcome = Outcome(paths=[session.found for session in sessions])
        if len(sessions) > 1:
            with contextlib.suppress(OutOfTime):
                outcome.together = _together(sessions, space, watch)
        _extras(options, outcome, sessions[0], watch)
        for session in sessions:
            session.judge(outcome.rates.get("copy"))
        outcome.seconds = allowance.spent
    return outcome


def _together(sessions: Sequence[Session], space: Space, watch: Watch) -> dict[Workload, tuple[float, float]]:
    """All paths at once, a process for each."""
    points = [session.found.chosen for session in sessions]
    chosen = [point for point in points if point is not None]
    if len(chosen) < len(points):
        return {}
    orders = [session.order(session.files, point) for session, point in zip(sessions, chosen, strict=True)]
    seconds = max(SHORTEST_S, (watch.time.take("together") - PROCESS_START_S) / (FLEET_ROUNDS * len(space.workloads)))
    with Fleet(orders) as fleet:
        return run_fleet(fleet, chosen, space.workloads, seconds, sessions)


def _extras(options: Options, outcome: Outcome, session: Session, watch: Watch) -> None:
    """Memory, GPU and the network of one machine."""
    if "memory" in options.extras or "device" in options.extras:
        _torch_extras(options, outcome, watch)
    watch.interrupted()
    if "allgather" not in options.extras:
        return
    seconds = watch.time.take("gather")
    # Only who asked for it by name waits longer than the run may take.
    timeout_s = GATHER_TIMEOUT_S if options.extras_given else watch.time.left
    if not seconds:
        outcome.skipped["allgather"] = "takes about 10 s: give --seconds 30 or more, or name it in --extras"
        return
    if timeout_s < GATHER_LEAST_S:
        outcome.skipped["allgather"] = NO_TIME
        return
    try:
        outcome.rates["all_gather"] = all_gather_rate(
            session.folder.data_file("store", 0),
            seconds=1.0,
            timeout_s=timeout_s,
            check=watch.interrupted,
        )
        watch.told(f"all-gather: {outcome.rates['all_gather'] / 1e9:.2f} GB/s")
    except GatherError as error:
        outcome.skipped["allgather"] = str(error)


def _torch_extras(options: Options, outcome: Outcome, watch: Watch) -> None:
    """Copies, Adam and the GPU; the reason where torch or the kernels cannot be imported."""
    if watch.time.left < TORCH_S and not options.extras_given:
        outcome.skipped |= {name: NO_TIME for name in ("memory", "device") if name in options.extras}
        return
    end = time.perf_counter() + watch.time.take("memory")
    try:
        # Here, not above: torch takes seconds to import, and the rest works without it.
        from . import rates
    except ImportError as error:
        for name in ("memory", "device"):
            if name in options.extras:
                outcome.skipped[name] = f"cannot be imported: {error}"
        return
    watch.interrupted()
    if "memory" in options.extras:
        try:
            outcome.rates |= rates.memory_rates(max(0.1, end - time.perf_counter()))
        except (OSError, MemoryError) as error:
            outcome.skipped["memory"] = f"no memory for the arrays: {error}"
        watch.told("memory and Adam")
    if "device" in options.extras:
        missing = rates.gpu_missing()
        if missing:
            outcome.skipped["device"] = missing
        else:
            outcome.rates |= rates.device_rates(max(0.2, watch.time.take("device")))


def _save(options: Options, report: Reporter, machine: dict[str, object], outcome: Outcome) -> str | None:
    """Write the profile; its path, or None."""
    if not options.save:
        return None
    profile = build_profile(options, machine, outcome, now=time.time())
    if profile is None:
        report.warning("no profile is saved: it needs read, write and mix")
        return None
    where: Path = save_profile(profile, options.save_as)
    report.line(f"profile: {where}")
    return str(where)

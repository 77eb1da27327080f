"""Signals at the `lamina` command: everything is closed on the way out, and the exit code tells which signal it was."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamina.bench import __main__ as command
from lamina.bench.interrupt import Interrupt, Stopped, signals_unwind
from lamina.bench.planner.check import run_ranks

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def offer(monkeypatch: pytest.MonkeyPatch, entry: object) -> None:
    """Make `entry` the only command, under the name "toy"."""
    monkeypatch.setattr(command, "COMMANDS", {"toy": ("lamina.bench.report:toy", "a toy")})
    monkeypatch.setattr("lamina.bench.report.toy", entry, raising=False)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_unwinds_the_command_and_handlers_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    def entry(arguments: Sequence[str]) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            Path(folder, "data").write_bytes(b"much")
            signal.raise_signal(number)
        return 0

    offer(monkeypatch, entry)
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    assert command.main(["toy"]) == code
    assert capsys.readouterr().err.startswith("lamina: interrupted")
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before


def test_what_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(arguments: Sequence[str]) -> int:
        signal.raise_signal(signal.SIGHUP)
        return 7

    offer(monkeypatch, entry)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command.main(["toy"]) == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_twice_at_once_does_not_break_the_unwinding() -> None:
    closed = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            closed.append(True)

    with signals_unwind(), pytest.raises(Stopped) as stopped:
        work()
    assert stopped.value.exit_code == 143
    assert closed == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_a_request_first_and_an_exception_then(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    with Interrupt() as interrupt:
        interrupt.check()
        assert (interrupt.requested, interrupt.exit_code) == (False, 0)
        signal.raise_signal(number)
        assert (interrupt.requested, interrupt.exit_code) == (True, 128 + number)
        with pytest.raises(Stopped) as checked:
            interrupt.check()
        with pytest.raises(Stopped):
            signal.raise_signal(number)
    assert checked.value.exit_code == 128 + number
    assert f"{number.name}: stopping after this step" in capsys.readouterr().err


COMMANDS = {
    "aio": ("aio", "--quick", "--size-mib", "16", "--rounds", "1000", "--path", "."),
    "simulate": ("simulate", "--toy", "--rounds", "1000"),
    "plan": ("plan",),
    "frontier": ("frontier", "--rounds", "1000"),
}


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(parent: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_a_command_on_disk_leaves_neither_folder_nor_process_at_sigterm(tmp_path: Path, name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "lamina.bench", *COMMANDS[name]],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + 90
            children: list[int] = []
            while not any(tmp_path.iterdir()) or (name in ("simulate", "frontier") and not children):
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
                children = children_of(process.pid)
            process.terminate()
            _, err = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 143, err
    assert "lamina: interrupted by SIGTERM" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []
    end = time.monotonic() + 60  # an orphan that was killed is still listed until its new parent has noticed
    while (left := [child for child in children if is_running(child)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def test_the_ranks_of_a_plan_check_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def stop(children: list[subprocess.Popen[str]]) -> None:
        started.extend(children)
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr("lamina.bench.planner.check._collect", stop)
    with pytest.raises(Stopped):
        run_ranks({}, 2)
    assert [child.returncode for child in started] == [-signal.SIGKILL] * 2

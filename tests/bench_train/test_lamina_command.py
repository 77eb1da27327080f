"""The `lamina` command: what it offers, how fast it answers, and what its exit codes mean."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from lamina.bench import __main__ as command


def lamina(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lamina.bench", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def offer(monkeypatch: pytest.MonkeyPatch, entry: Callable[[Sequence[str]], int]) -> None:
    """Make `entry` the only command, under the name "toy"."""
    monkeypatch.setattr(command, "COMMANDS", {"toy": ("lamina.bench.report:toy", "a toy")})
    monkeypatch.setattr("lamina.bench.report.toy", entry, raising=False)


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def entry(arguments: Sequence[str]) -> int:
        raise error

    return entry


def test_help_and_version_do_without_torch_and_the_engine() -> None:
    program = (
        "import sys\n"
        "from lamina.bench.__main__ import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "heavy = {'torch', 'numpy', 'lamina.engine', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "train " in done.stdout


def test_only_commands_that_this_build_has_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"here": ("lamina.bench.report:x", "found"), "gone": ("lamina.bench.no_such_module:x", "absent")}
    monkeypatch.setattr(command, "COMMANDS", table)
    assert command.available() == {"here": "found"}
    assert "gone" not in command.usage()


def test_an_unknown_command_lists_the_known_ones() -> None:
    done = lamina("trian")
    assert done.returncode == 2
    assert "no command 'trian'; there are: train" in done.stderr
    assert lamina().returncode == 2


def test_the_command_gets_its_arguments_and_its_code_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    def entry(arguments: Sequence[str]) -> int:
        seen.append(arguments)
        return 7

    offer(monkeypatch, entry)
    assert command.main(["toy", "--a", "b", "--traceback"]) == 7
    assert seen == [["--a", "b"]]


class OwnError(RuntimeError):
    """As lamina's layers define them."""


OwnError.__module__ = "lamina.tiers.errors"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("--x 3: too small"), 2, "--x 3: too small"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 2, "No such file: /x"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "Permission denied: /x"),
        (OSError(errno.EROFS, "Read-only", "/x"), 2, "Read-only: /x"),
        (OSError(errno.ENOSPC, "No space left", "/x"), 1, "No space left: /x"),
        (OSError(errno.EIO, "I/O error"), 1, "[Errno 5] I/O error"),
        (MemoryError("wanted 3, free 2"), 1, "wanted 3, free 2"),
        (OwnError("locked by process 12"), 1, "locked by process 12"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_message_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    offer(monkeypatch, raising(error))
    assert command.main(["toy"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"lamina: {message}\n"
    assert command.main(["--traceback", "toy"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_loaded_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> Callable[[Sequence[str]], int]:
        raise KeyboardInterrupt

    offer(monkeypatch, lambda arguments: 0)
    monkeypatch.setattr(command, "load", load)
    assert command.main(["toy"]) == 130
    assert capsys.readouterr().err == "lamina: interrupted\n"


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        command.main(["toy"])


def test_argparse_errors_exit_with_2_and_help_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "--no-such-option"]) == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
    assert command.main(["train", "--help"]) == 0
    assert "--nvme-path" in capsys.readouterr().out


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    program = (
        "import sys\n"
        "from lamina.bench.__main__ import run\n"
        "def print_much(arguments):\n"
        "    for _ in range(1000): print('x' * 10000, flush=True)\n"
        "sys.exit(run(print_much, [], show_traceback=False))\n"
    )
    reader, writer = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, b"")

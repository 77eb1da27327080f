"""The `lamina` command, also `python -m lamina.bench`: calls the subcommand, maps its errors to exit codes.

Exit codes: 0 success, 1 the work failed, 2 the user's input was wrong, 128 + N ended by signal N
(130 Ctrl-C, 143 SIGTERM): whatever the command had made for itself is removed on the way out.
"""

import errno
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from lamina.bench.interrupt import Stopped, signals_unwind

SUCCESS, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("lamina.bench.training.command:main", "train a byte-level GPT on real text with its state on NVMe"),
    "doctor": ("lamina.bench.doctor.command:main", "what this machine offers, which backend is used and why"),
    "nvme": ("lamina.bench.nvme:main", "measure the bandwidth between files and memory"),
    "plan": ("lamina.bench.planner.command:main", "what fits where, and how long a step takes"),
    "timeline": (
        "lamina.bench.timeline_command:main",
        "draw a step of a trace, measured or simulated, in lanes of time",
    ),
    "aio": ("lamina.bench.aio.command:main", "compare the I/O backends"),
    "adam": ("lamina.bench.adam:main", "measure the CPU Adam kernels"),
    "simulate": ("lamina.bench.simulate:main", "run the scheduler on a described machine, without I/O"),
    "frontier": ("lamina.bench.frontier.command:main", "step time against memory budget"),
}
"""name -> ("module:function", one line of help). The function takes the arguments after the name and returns
an exit code. A command whose module is not part of this build is not offered."""

_USER_ERRNOS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
"""What a wrong path or a missing right causes; the others (a full disk, EIO) are failures of the work."""


def available() -> dict[str, str]:
    """Help lines of the commands that this build has, in the order of the table."""
    return {
        name: text
        for name, (target, text) in COMMANDS.items()
        if importlib.util.find_spec(target.partition(":")[0]) is not None
    }


def version() -> str:
    """The installed version, or "unknown" when run from a tree that was never installed."""
    try:
        return importlib.metadata.version("lamina")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def usage() -> str:
    """The text of `lamina --help`."""
    commands = available()
    width = max(map(len, commands), default=0)
    return "\n".join(
        [
            "usage: lamina [--version] [--help] [--traceback] COMMAND [OPTION...]",
            "",
            "Train and serve models whose state does not fit the memory at hand.",
            "",
            "commands (`lamina COMMAND --help` for the options of each):",
            *(f"  {name:{width}}  {text}" for name, text in commands.items()),
            "",
            "--traceback shows where in the code an error was raised.",
        ]
    )


def load(name: str) -> Callable[[Sequence[str]], int]:
    """Import the function of a command in the table."""
    module, _, function = COMMANDS[name][0].partition(":")
    entry: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return entry


def exit_code(error: BaseException) -> int:
    """The exit code for an error that left a command."""
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError):
        return USAGE if error.errno in _USER_ERRNOS else FAILURE
    return USAGE if isinstance(error, ValueError) else FAILURE


def speaks_for_itself(error: BaseException) -> bool:
    """Whether an error's message is meant for users: wrong input, the system's refusal, or a class of our own."""
    ours = type(error).__module__.partition(".")[0] == "lamina"
    return ours or isinstance(error, ValueError | OSError | MemoryError | KeyboardInterrupt)


def explain(error: BaseException) -> str:
    """What to print for an error: its message, which for system errors holds the path."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def run(entry: Callable[[Sequence[str]], int], arguments: Sequence[str], *, show_traceback: bool) -> int:
    """Call a command; turn what it raises, and signals, into one message on stderr and an exit code.

    An error that says nothing to a user is our own fault and goes through, with its traceback.
    """
    try:
        with signals_unwind():
            return entry(arguments)
    except BrokenPipeError:
        # Whoever read our output has gone: point stdout elsewhere, or the flush at exit raises again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (Exception, KeyboardInterrupt) as error:
        if not speaks_for_itself(error):
            raise
        if show_traceback:
            traceback.print_exc()
        else:
            print(f"lamina: {explain(error)}", file=sys.stderr)
        return exit_code(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lamina ARGV...`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = False
    while "--traceback" in arguments:
        arguments.remove("--traceback")
        show_traceback = True
    if not arguments:
        print(usage(), file=sys.stderr)
        return USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(usage())
        return SUCCESS
    if name == "--version":
        print(f"lamina {version()}")
        return SUCCESS
    commands = available()
    if name not in commands:
        print(f"lamina: no command {name!r}; there are: {', '.join(commands)}", file=sys.stderr)
        return USAGE

    def load_and_call(given: Sequence[str]) -> int:
        # Loading takes seconds, in which Ctrl-C is to be as quiet as later.
        return load(name)(given)

    try:
        return run(load_and_call, rest, show_traceback=show_traceback)
    except SystemExit as done:  # argparse leaves this way after --help and after a wrong option
        return done.code if isinstance(done.code, int) else (SUCCESS if done.code is None else USAGE)


if __name__ == "__main__":
    sys.exit(main())

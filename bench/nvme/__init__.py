"""`lamina nvme`: how fast files can be read and written, and with which settings.

points and outcome: plain data. search, verdict, budget: decisions, pure. folder, space, measure, worker, fleet, fio,
rates, gather: what touches the machine. session and command: the course of a run. show, picture, result: the report.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run `lamina nvme ARGUMENTS`; returns the exit code."""
    # Not above: measuring processes import this package too, and start three times as fast without the command.
    from .command import main as run

    return run(arguments)


__all__ = ["main"]

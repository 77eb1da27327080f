"""`lamina nvme`: how fast files can be read and written, and with which settings.

points and outcome: plain data. search, verdict, budget: decisions, pure. folder, space, measure, worker, fleet, fio,
rates, gather: what touches the machine. session and command: the course of a run. show, picture, result: the report.
"""

from .command import main

__all__ = ["main"]

"""Runs in this process are given as long as they take: how slow the machine is decides nothing."""

import pytest

from lamina.bench.nvme import command


@pytest.fixture(autouse=True)
def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_DEADLINE_S", 1e6)

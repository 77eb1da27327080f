"""The comparison runs at toy size, prints its tables and ends in one JSON line."""

import json
from pathlib import Path

import pytest

from lamina.bench.aio import main


@pytest.mark.filterwarnings("ignore::lamina.aio_native.AsyncIOWarning")
def test_the_comparison_runs_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size-mib", "2", "--rounds", "1", "--reads", "20", "--quick", "--directions", "read", "rw"]
    assert main(["--path", str(tmp_path), *options]) == 0
    text = capsys.readouterr().out
    result = json.loads(text.splitlines()[-1])
    rows = {(row["subject"], row["direction"]) for row in result["transfers"]}
    assert {("threads", "read"), ("threads", "rw"), ("threads, ordinary", "read")} <= rows
    assert all(row["gbps"] > 0 for row in result["transfers"])
    assert result["latency_us"]["threads, read_now()"] > 0
    assert "GB/s" in text
    assert list(tmp_path.iterdir()) == []


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--rounds", "0"])
    assert caught.value.code == 2
    assert "--rounds must be at least 1, not 0" in capsys.readouterr().err

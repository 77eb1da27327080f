"""The comparison runs at toy size, prints its tables and ends in one JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.aio_native import AsyncIO, File
from lamina.bench.aio.command import main
from lamina.bench.aio.rounds import Series, rival_of, takes_part
from lamina.bench.aio.subjects import Sample, Shape

TOY = ["--size-mib", "2", "--rounds", "1", "--reads", "20", "--quick"]

PEER = """#!{python}
import json, sys
print(json.dumps({{"version": "9.9"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    assert order["memory"] in ("pinned", "ordinary") and order["direction"] in ("read", "write")
    print(json.dumps({{"seconds": order["nbytes"] / 1e9 / 4, "cpu_s": 0.5}}), flush=True)
"""


@pytest.fixture(autouse=True)
def _cached_where_nothing_else_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command wants direct I/O, for its figures' sake; what is tested here works without."""
    real = AsyncIO.open

    def open_any(io: AsyncIO, path: Path, **options: Any) -> File:
        return real(io, path, **(options | {"direct": None}))

    monkeypatch.setattr(AsyncIO, "open", open_any)


@pytest.mark.filterwarnings("ignore::lamina.aio_native.AsyncIOWarning")
def test_the_comparison_runs_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--path", str(tmp_path), *TOY, "--directions", "read", "rw"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text.splitlines()[-1])
    rows = {(row["subject"], row["direction"]) for row in result["transfers"]}
    assert {("threads", "read"), ("threads", "rw"), ("threads, ordinary", "read")} <= rows
    assert all(row["gbps"] > 0 for row in result["transfers"])
    assert result["latency_us"]["threads, read_now()"] > 0
    assert "GB/s" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::lamina.aio_native.AsyncIOWarning")
def test_a_peer_takes_part_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer, folder = tmp_path / "python", tmp_path / "disk"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o700)
    folder.mkdir()
    assert main(["--path", str(folder), *TOY, "--directions", "write", "rw", "--peer-python", str(peer)]) == 0
    text = capsys.readouterr().out
    rows = {(row["subject"], row["direction"]): row for row in json.loads(text.splitlines()[-1])["transfers"]}
    assert rows["DeepSpeed, pinned", "write"]["gbps"] == pytest.approx(4)
    mine = rows["threads, ordinary", "write"]
    assert mine["gbps_to_deepspeed"] == pytest.approx(mine["gbps"] / 4)
    assert ("DeepSpeed, pinned", "rw") not in rows
    assert "DeepSpeed 9.9" in text


@pytest.mark.filterwarnings("ignore::lamina.aio_native.AsyncIOWarning")
def test_a_peer_that_cannot_be_had_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "no-such-python")
    assert main(["--path", str(tmp_path), *TOY, "--directions", "read", "--peer-python", missing]) == 0
    told = capsys.readouterr()
    assert f"DeepSpeed's async_io cannot be used: {missing}: No such file" in told.err
    assert "DeepSpeed, pinned" not in told.out


def test_ratios_are_taken_round_by_round() -> None:
    mine = Series([Sample(gbps=rate, cpu_s_per_gib=0.1) for rate in (1.0, 4.0, 3.0)])
    fio = Series([Sample(gbps=rate, cpu_s_per_gib=cpu) for rate, cpu in ((2.0, 0.2), (2.0, 0.0), (1.0, 0.1))])
    assert mine.ratios(fio) == [0.5, 2.0, 3.0]
    assert mine.ratios(fio, "cpu_s_per_gib") == [0.5, 1.0]  # a round without CPU time says nothing
    assert mine.ratios(None) == []


def test_rows_are_compared_with_the_same_kind_of_memory() -> None:
    assert rival_of("uring, large") == "DeepSpeed, pinned"
    assert rival_of("threads, ordinary") == "DeepSpeed, ordinary"
    assert rival_of("uring") is rival_of("fio, scrambling") is rival_of("DeepSpeed, ordinary") is None
    read, mix = (Shape(direction=way, block_bytes=1, depth=1, nbytes=2) for way in ("read", "rw"))
    assert takes_part("fio, scrambling", mix)
    assert not takes_part("fio, scrambling", read)
    assert not takes_part("DeepSpeed, pinned", mix)


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--rounds", "0"])
    assert caught.value.code == 2
    assert "--rounds must be at least 1, not 0" in capsys.readouterr().err

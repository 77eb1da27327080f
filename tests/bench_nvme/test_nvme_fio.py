"""The comparison with fio, by a stand-in that answers as fio does, and by fio itself where it is installed."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from nvme_toys import TOY, leftovers, measured, point

from lamina.bench.nvme import main
from lamina.bench.nvme.fio import FioError, FioResult, arguments, find_fio, free_huge_pages, run_fio
from lamina.bench.nvme.outcome import FioPair
from lamina.bench.nvme.points import Point, Space, Workload
from lamina.bench.nvme.session import best_of_fio, fio_points

STAND_IN = """#!{python}
import json, os, sys, time
options = dict(one[2:].partition("=")[::2] for one in sys.argv[1:])
if "version" in options:
    print("fio-3.99"); sys.exit(0)
with open({log!r}, "a") as log:
    log.write(json.dumps([options, os.environ.get("GLIBC_TUNABLES", "")]) + "\\n")
{fault}
time.sleep(0.02)
rate = 1e9 if options["bs"] == "262144" else 5e8
read = rate if options["rw"] in ("read", "rw") else 0
write = rate if options["rw"] in ("write", "rw") else 0
print("fio: some remark before the data")
print(json.dumps({{"jobs": [{{"read": {{"bw_bytes": read}}, "write": {{"bw_bytes": write}}}}]}}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a stand-in for fio first in PATH; returns the log of its calls."""
    return make_stand_in(tmp_path, monkeypatch, fault="")


def make_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> Path:
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    program = folder / "fio"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), fault=fault))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def run(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*TOY, "--json", "--fio", *more]) == 0
    (path,) = json.loads(capsys.readouterr().out)["paths"]
    return dict(path)


def test_both_are_measured_in_turn_at_their_best(
    tmp_path: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    path = run(capsys, "--backends", "threads", str(work))
    if not path["direct"]:
        pytest.skip("no direct I/O here")
    assert [pair["workload"] for pair in path["fio"]] == ["read", "write", "mix"]
    for pair in path["fio"]:
        assert len(pair["ours"]) == len(pair["same"]) == len(pair["fio"]) >= 3
        assert set(pair["fio"]) <= {1e9, 5e8, 2e9}
        best = max(pair["grid"], key=lambda cell: cell["rate"])
        assert pair["fio_point"]["block_bytes"] == best["block_bytes"]
    calls = [json.loads(line) for line in stand_in.read_text().splitlines()]
    for options, tunables in calls:
        assert options["direct"] == "1"
        assert options["filename"].startswith(str(work))
        assert options["ioengine"] == "libaio"
        assert (tunables == "glibc.malloc.hugetlb=1") is (path["page_kind"] != "small" and options["iomem"] == "malloc")
    assert leftovers(work) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sys.exit('engine io_uring not loadable')", "engine io_uring not loadable"),
        ("print('nonsense'); sys.exit(0)", "fio's output was not understood"),
    ],
)
def test_a_fio_that_fails_is_noted_and_the_rest_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, reason: str
) -> None:
    make_stand_in(tmp_path, monkeypatch, fault)
    path = run(capsys, "--workloads", "read", str(tmp_path))
    if not path["direct"]:
        pytest.skip("no direct I/O here")
    assert path["fio"] == []
    assert any("no comparison with fio" in note and reason in note for note in path["notes"])
    assert path["best"]["read"]["read"] > 0


def test_without_fio_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FioError, match="package fio"):
        find_fio()


def test_pages_that_are_spoken_for_are_not_free(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("HugePages_Total: 300\nHugePages_Free:  200\nHugePages_Rsvd:  150\nHugepagesize:    2048 kB\n")
    assert free_huge_pages(info) == 50 << 21
    info.write_text("MemTotal: 1 kB\n")
    assert free_huge_pages(info) == 0


def test_the_command_line_of_a_point() -> None:
    line = arguments(
        "fio",
        Path("/d/a:b.bin"),
        Point(backend="uring", block_bytes=1 << 20, queue_depth=32),
        Workload.MIX,
        nbytes=1 << 30,
        seconds=0.5,
        read_share=0.7,
        hugetlb=True,
    )
    for wanted in (
        "--rw=rw", "--rwmixread=70", "--bs=1048576", "--iodepth=32", "--ioengine=io_uring", "--runtime=500ms",
        "--iomem=mmaphuge", "--filename=/d/a\\:b.bin", "--direct=1", "--size=1073741824",
    ):  # fmt: skip
        assert wanted in line


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("workload", list(Workload))
def test_fio_itself_gives_figures(tmp_path: Path, workload: Workload) -> None:
    file = tmp_path / "fio 1.bin"
    file.write_bytes(os.urandom(8 << 20))
    fio, version = find_fio()
    assert version.startswith("fio")
    result = run_fio(
        fio, file, point("threads", 256 << 10, 16), workload,
        nbytes=8 << 20, seconds=0.1, read_share=0.5, huge_pages=True, check=lambda: None,
    )  # fmt: skip
    assert (result.read > 0, result.write > 0) == (workload is not Workload.WRITE, workload is not Workload.READ)
    assert file.stat().st_size == 8 << 20


def test_stopping_ends_fio_too(tmp_path: Path, stand_in: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fio(
            find_fio()[0], tmp_path / "f", point(), Workload.READ,
            nbytes=1 << 20, seconds=30.0, read_share=0.5, huge_pages=False, check=stop,
        )  # fmt: skip


def test_fio_is_tried_on_our_best_and_on_others() -> None:
    space = Space(backends=("uring", "threads"), blocks=(1 << 16, 1 << 20), depths=(1, 2, 4, 8, 16), files=(1, 2))
    results = [
        measured(1e9 + depth * 1e6, at=point("uring", block, depth)) for block in space.blocks for depth in space.depths
    ]
    results.append(measured(9e9, at=point("threads", 1 << 20, 8)))
    mine = point("uring", 1 << 20, 16, files=2)
    points = fio_points(space, results, mine, Workload.READ)
    assert points[0] == point("uring", 1 << 20, 16)
    assert len(points) == len(set(points))
    assert {one.backend for one in points} == {"uring"}
    assert {one.files for one in points} == {1}
    assert point("uring", 1 << 16, 16) in points


def test_fios_best_is_looked_for_with_the_same_kind_of_memory() -> None:
    fast, slow = point(depth=1), point(depth=32)
    tried = {
        fast: FioResult(read=3e9, write=0.0, page_kind="small"),
        slow: FioResult(read=2e9, write=0.0, page_kind="thp"),
    }
    assert best_of_fio(tried, huge_pages=True) == slow
    assert best_of_fio(tried, huge_pages=False) == fast
    assert best_of_fio({fast: tried[fast]}, huge_pages=True) == fast


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    pair = FioPair(
        workload=Workload.READ,
        point=point(),
        fio_point=point(),
        ours=(1.0, 2.0, 9.0),
        fio=(1.0, 1.0, 10.0),
        same=(2.0, 1.0, 5.0),
        fio_page_kind="thp",
        grid={},
    )
    assert pair.ratio == 1.0
    assert pair.same_ratio == 1.0

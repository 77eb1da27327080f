"""`lamina nvme` from end to end at toy size: every option, on both backends and several file systems."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvme_toys import RING_BAN, TOY, lamina, leftovers, result_of, ticking

from lamina.aio_native import AsyncIO, BackendUnavailableError
from lamina.bench.nvme import main
from lamina.bench.nvme.args import parse, parse_size
from lamina.engine.config import EngineConfig
from lamina.engine.planner import this_machine
from lamina.tiers.links.profile_file import load_profile


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on tmpfs."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The JSON of a toy run in this process."""
    assert main([*TOY, "--json", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def uring_works() -> bool:
    try:
        AsyncIO(backend="uring", queue_depth=2).close()
    except BackendUnavailableError:
        return False
    return True


def test_a_toy_run_leaves_nothing_and_says_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ticking(monkeypatch)
    assert main([*TOY, "--seconds", "1", "--grid", str(tmp_path)]) == 0
    assert clock.now < 2
    out, err = capsys.readouterr()
    assert leftovers(tmp_path) == []
    for wanted in (
        "kernel Linux", "best", ", for all", "as fast: read: ", "GB/s", "first write to fresh space", "backend threads", "4 KiB",
        "wrote", "for the config", '"block_size"',
    ):  # fmt: skip
        assert wanted in out
    assert "nvme 100/100" in err


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_the_json_of_one_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    if backend == "uring" and not uring_works():
        pytest.skip("io_uring cannot be used here")
    result = run(capsys, "--backends", backend, "--read-share", "0.3", tmp_path)
    (path,) = result["paths"]
    assert set(path["best"]) == {"read", "write", "mix"}
    assert {trial["backend"] for trial in path["trials"]} == {backend}
    assert path["best"]["read"]["read"] > 0
    assert path["best"]["write"]["write"] > 0
    assert path["first_write"] > 0
    assert path["written_bytes"] >= 8 << 20
    assert path["direct"] is (path["file_system"] not in ("tmpfs", "ramfs"))
    best = path["best"]["read"]
    rates = [
        trial["read"]
        for trial in path["trials"]
        if trial["workload"] == "read" and {key: trial[key] for key in best["point"]} == best["point"]
    ]
    assert best["rate"]["samples"] == len(rates)
    assert best["rate"]["low"] <= best["rate"]["median"] <= best["rate"]["high"]
    assert sorted(rates)[(len(rates) - 1) // 2] <= best["rate"]["median"] <= sorted(rates)[len(rates) // 2]


def test_the_block_to_paste_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(capsys, tmp_path)["paths"]
    block, chosen = path["config"], path["chosen"]
    config = EngineConfig.load({"train_batch_size": 1, **block})
    assert config.aio.block_size == chosen["block_bytes"]
    assert config.aio.queue_depth == chosen["queue_depth"]
    assert config.tiers.io_backend == chosen["backend"]
    assert not [hint for hint in config.hints if "aio.block_size" in hint]


def test_only_some_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(capsys, "--workloads", "write", tmp_path)["paths"]
    assert set(path["best"]) == {"write"}
    assert all(trial["read"] == 0 for trial in path["trials"])


def test_small_pages_and_buffered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--small-pages", "--buffered", "--workloads", "read", tmp_path)
    (path,) = result["paths"]
    assert (path["page_kind"], path["direct"], path["pages"]) == ("small", False, {})
    assert [warned["doubt"] for warned in path["warnings"]].count("cached") == 1


def test_the_effect_of_huge_pages_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(capsys, "--block-sizes", "1M", "--queue-depths", "4", tmp_path)["paths"]
    if path["page_kind"] == "small":
        pytest.skip("no huge pages here")
    for workload in ("read", "write"):
        effect = path["pages"][workload]
        assert effect["gain"] == pytest.approx(effect["huge"]["median"] / effect["small"]["median"])


def test_tmpfs_is_said_to_be_cached(memory_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TOY, str(memory_folder)]) == 0
    out = capsys.readouterr().out
    assert "page cache, NOT the disk" in out
    assert "WARNING, cached" in out
    assert "tmpfs lives in memory" in out
    assert leftovers(memory_folder) == []


def test_several_paths_alone_and_together(
    tmp_path: Path, memory_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, tmp_path, memory_folder, "--save-as", tmp_path / "p.json")
    assert [path["path"] for path in result["paths"]] == [str(tmp_path), str(memory_folder)]
    assert set(result["together"]) == {"read", "write", "mix"}
    assert result["together"]["read"]["read"] > 0
    assert result["together"]["read"]["write"] == 0
    profile = load_profile([tmp_path, memory_folder], file=tmp_path / "p.json")
    assert profile.together is not None
    assert profile.together.mixed_write == result["together"]["mix"]["write"]
    assert leftovers(memory_folder) == []
    assert leftovers(tmp_path) == ["p.json"]


def test_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(capsys, "--processes", "2", tmp_path)["paths"]
    assert set(path["processes"]) == {"read", "write", "mix"}
    assert all(rates["read"] + rates["write"] > 0 for rates in path["processes"].values())
    assert leftovers(tmp_path) == []


def test_the_saved_profile_is_what_planner_and_scheduler_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    result = run(capsys, "--save", work)
    (path,) = result["paths"]
    assert Path(result["profile"]).parent == tmp_path / "cache" / "lamina"
    profile = load_profile([work])
    disk = profile.disk(work)
    chosen = path["chosen"]
    assert (disk.block_bytes, disk.queue_depth, disk.backend) == (
        chosen["block_bytes"],
        chosen["queue_depth"],
        chosen["backend"],
    )
    machine = this_machine(rates=profile.planner_rates(), nvme_path=work)
    assert machine.nvme_read_bandwidth == disk.read.median
    assert disk.speed().seconds(10**9, 0) == pytest.approx(1e9 / disk.read.median)


def test_a_profile_needs_all_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TOY, "--workloads", "read", "--save-as", str(tmp_path / "p.json"), str(tmp_path)]
    assert main(arguments) == 0
    assert "no profile is saved" in capsys.readouterr().err
    assert leftovers(tmp_path) == []


def test_memory_and_adam_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--extras", "memory,device", "--workloads", "read", tmp_path)
    rates = result["rates"]
    assert {"copy", "triad", "stream", "adam", "adam_elements"} <= set(rates)
    assert rates["adam"] == pytest.approx(28 * rates["adam_elements"])
    assert "device" in result["skipped"] or rates["host_to_device"] > 0


def test_it_runs_where_io_uring_is_forbidden(tmp_path: Path) -> None:
    banned = [str(RING_BAN), "EPERM"]
    done = lamina("nvme", *TOY, "--json", str(tmp_path), launcher=banned)
    (path,) = result_of(done)["paths"]
    assert {trial["backend"] for trial in path["trials"]} == {"threads"}
    forced = lamina("nvme", *TOY, "--backends", "uring", str(tmp_path), launcher=banned)
    assert forced.returncode != 0
    assert "io_uring" in forced.stderr
    assert "seccomp" in forced.stderr
    assert leftovers(tmp_path) == []


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    work = tmp_path / "work"
    work.mkdir()
    run(capsys, "--plot", tmp_path / "p.png", work)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "1K", "."], "--size 1024: must be at least"),
        (["--size", "64K", "--block-sizes", "256K", "--files", "1", "."], "larger --size, fewer --files or smaller"),
        (["--buffer", "64K", "--block-sizes", "256K", "."], "larger --buffer"),
        (["--plot", "/no/such/folder/p.png", "."], "there is no folder /no/such/folder"),
        (["--plot", "p.txt", "."], "no picture of this kind"),
    ],
)
def test_options_that_do_not_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main(["--extras", "none", *arguments])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--seconds", "0", "."],
        ["--seconds", "nan", "."],
        ["--block-sizes", "5", "."],
        ["--queue-depths", "0", "."],
        ["--backends", "libaio", "."],
        ["--workloads", "trim", "."],
        ["--read-share", "1.5", "."],
        ["--processes", "-1", "."],
        ["--extras", "coffee", "."],
        ["--size", "many", "."],
    ],
)
def test_options_that_cannot_be_read(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "usage: lamina nvme" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64K", 1 << 16),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        ("1MB", 10**6),
        ("1.5k", 1536),
        ("2GB", 2 * 10**9),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_a_path_given_twice_counts_once(tmp_path: Path) -> None:
    assert parse([str(tmp_path), str(tmp_path)]).paths == (tmp_path,)

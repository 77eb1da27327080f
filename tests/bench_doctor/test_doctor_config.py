"""`lamina doctor --config`: a config against this machine."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.doctor.command import main
from lamina.bench.doctor.config import check_config
from lamina.bench.doctor.finding import Finding, State
from lamina.tiers.links.device_identity import identify
from lamina.tiers.links.profile import DiskProfile, Profile, Rate
from lamina.tiers.links.profile_file import save_profile
from lamina.tiers.memory.limits import MemoryLimits


def write(folder: Path, **config: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"train_batch_size": 4, **config}))
    return file


def findings(folder: Path, **config: Any) -> list[Finding]:
    return list(check_config(write(folder, **config)))


def by_name(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def test_a_config_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, tiers={"nvme": [{"path": str(tmp_path / "state"), "bytes": "1MiB"}], "host_bytes": "16MiB"})
    assert main(["--config", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ok"] is True
    names = [finding["name"] for finding in result["findings"]]
    assert {"tiers.io_backend", "tiers.host_bytes", str(tmp_path / "state")} <= set(names)
    assert "config" in err
    assert os.listdir(tmp_path) == ["config.json"]


def test_memory_that_no_gpu_copies_from_need_not_be_lockable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MemoryLimits(total=4 << 30, available=2 << 30, cgroup=None, address_space_free=None, lockable=64 << 10)
    monkeypatch.setattr("lamina.bench.doctor.config.read_memory_limits", lambda: limits)
    for gpu, state in ((False, State.OK), (True, State.FAIL)):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        assert by_name(findings(tmp_path, tiers={"host_bytes": "16MiB"}), "tiers.host_bytes").state is state


def test_every_problem_of_the_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, gradient_clippin=1.0, tiers={"generations": 9})
    assert main(["--config", str(file)]) == 1
    out = capsys.readouterr().out
    for wanted in ("gradient_clippin", "tiers.generations", f"mend: edit {file}", "2 problems"):
        assert wanted in out


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    (gone,) = check_config(tmp_path / "gone.json")
    assert gone.state is State.FAIL
    (tmp_path / "bad.json").write_text("{")
    (bad,) = check_config(tmp_path / "bad.json")
    assert bad.state is State.FAIL


def test_budgets_that_the_machine_has_not(tmp_path: Path) -> None:
    found = findings(tmp_path, tiers={"host_bytes": "900TB", "device_bytes": "900TB"})
    for name in ("tiers.host_bytes", "tiers.device_bytes"):
        assert by_name(found, name).state is State.FAIL
        assert f"lower {name} to " in by_name(found, name).mend


def test_more_disk_than_is_free(tmp_path: Path) -> None:
    path = tmp_path / "state"
    found = findings(tmp_path, tiers={"nvme": [{"path": str(path), "bytes": "900PB"}]})
    (space,) = [finding for finding in found if "the config wants" in finding.text]
    assert (space.state, space.name) == (State.FAIL, str(path))


@pytest.mark.parametrize("name", ["state", "with spaces and ñ", "deep/er/still"])
def test_folders_that_can_be_made_are_fine(tmp_path: Path, name: str) -> None:
    found = findings(tmp_path, tiers={"nvme": [str(tmp_path / name)]})
    assert not [finding for finding in found if finding.state is State.FAIL]
    assert not (tmp_path / name).exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    found = findings(tmp_path, tiers={"nvme": [str(tmp_path / "state")]})
    assert by_name(found, str(tmp_path / "state")).state is State.FAIL


def test_deepspeeds_blocks_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "file")}}
    found = findings(tmp_path, zero_optimization=zero)
    assert by_name(found, str(tmp_path / "file")).state is State.FAIL


def test_hints_are_passed_on(tmp_path: Path) -> None:
    found = findings(tmp_path, aio={"single_submit": True})
    hints = [finding for finding in found if finding.name == "hint"]
    assert any("aio.single_submit" in hint.text for hint in hints)


def test_the_launchers_ranks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert any(finding.state is State.FAIL for finding in findings(tmp_path))  # 4 samples over 3 ranks
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = findings(tmp_path)
    assert "2 rank(s)" in found[0].text


def rate(value: float) -> Rate:
    return Rate(median=value, low=value, high=value, samples=1)


def test_a_profile_is_told_and_compared_with_the_aio_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lamina.bench.doctor.path.IN_MEMORY", ())  # wherever temporary files are
    disk = DiskProfile(
        path=str(tmp_path),
        identity=identify(tmp_path),
        direct=True,
        page_kind="thp",
        backend="uring",
        block_bytes=2 << 20,
        queue_depth=16,
        num_threads=16,
        files=1,
        read=rate(2.5e9),
        write=rate(4.5e9),
        mixed_read=rate(1.5e9),
        mixed_write=rate(1.5e9),
        read_share=0.5,
        read_latency_s=1e-3,
        write_latency_s=1e-3,
        first_write=None,
    )
    profile = Profile(created=time.time(), processor="p", cores=2, disks=(disk,))
    file = save_profile(profile)
    settings = {"tiers": {"nvme": [str(tmp_path)]}}
    found = findings(tmp_path, **settings)
    assert any("measured 0 days ago: read 2.50, write 4.50 GB/s" in finding.text for finding in found)
    assert "block_size 2097152, queue_depth 16" in by_name(found, "aio").text
    same = findings(tmp_path, aio={"block_size": 2 << 20, "queue_depth": 16}, **settings)
    assert not [finding for finding in same if finding.name == "aio"]
    save_profile(dataclasses.replace(profile, kernel="0.1"), file)
    stale = findings(tmp_path, **settings)
    (told,) = [finding for finding in stale if "measured under Linux 0.1" in finding.text]
    assert (told.state, told.mend) == (State.INFO, f"lamina nvme --save {tmp_path}")

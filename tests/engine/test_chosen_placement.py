"""engine.plan: homes chosen by what is known of the links, where that knowledge comes from, and why it is so."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from small_model import batch, build

from lamina.engine import TrainingEngine, initialize
from lamina.tiers import DiskSpeed, Tier
from lamina.tiers.links.device_identity import identify
from lamina.tiers.links.profile import DiskProfile, MachineRates, Profile, Rate
from lamina.tiers.links.profile_file import save_profile

KIB = 1 << 10


def config(path: Path, **tiers: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tiers": {"nvme": [str(path)], "device_bytes": 300 * KIB, "host_bytes": 1900 * KIB} | tiers,
    }


def start(settings: dict[str, Any]) -> TrainingEngine:
    return initialize(build(), config=settings)[0]


def rate(median: float) -> Rate:
    return Rate(median=median, low=median, high=median, samples=3)


def keep_profile(path: Path, *, read: float, write: float) -> Path:
    disk = DiskProfile(
        path=str(path),
        identity=identify(path),
        direct=True,
        page_kind="thp",
        backend="uring",
        block_bytes=1 << 20,
        queue_depth=32,
        num_threads=8,
        files=1,
        read=rate(read),
        write=rate(write),
        mixed_read=rate(read / 2),
        mixed_write=rate(write / 2),
        read_share=0.5,
        read_latency_s=3.2e-3,
        write_latency_s=6.4e-3,
        first_write=None,
    )
    machine = MachineRates(adam_elements=7e8)
    return save_profile(Profile(created=time.time(), processor="any", cores=2, disks=(disk,), machine=machine))


def test_the_profile_of_the_disk_is_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lamina.tiers.links.known_links.probe_disk", None)  # a probe would fail
    file = keep_profile(tmp_path, read=1.5e9, write=2.5e9)
    with start(config(tmp_path / "state")) as engine:
        link = engine.runtime.decision.links.model.link("nvme")
        choice = engine.runtime.decision.choice
        assert (link.read.rate(), link.write.rate()) == (1.5e9, 2.5e9)
        assert (link.read.latency_s, link.write.latency_s) == pytest.approx((1e-4, 2e-4))
        assert choice is not None
        assert choice.question.times.adam_elements_per_s == 7e8
        assert f"from the profile {file}" in str(engine.plan)
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.metrics().lower_bound_s > 0


def test_without_a_profile_a_probe_is_taken_and_the_command_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with start(config(tmp_path / "state")) as engine:
        said = str(engine.plan)
        assert "from a probe of 1,048,576 bytes" in said
        assert f"lamina nvme --save {tmp_path / 'state'}" in said
        assert engine.runtime.decision.links.disks[0].read > 0
    assert list(tmp_path.iterdir()) == [] or not any((tmp_path / "state").iterdir())


def test_the_plan_says_what_lives_where_what_binds_and_what_more_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskSpeed(read=1e9, write=1e9, direct=True)
    monkeypatch.setattr("lamina.tiers.links.known_links.probe_disk", lambda *_: disk)
    with start(config(tmp_path)) as engine:
        said, data = str(engine.plan), json.loads(engine.plan.to_json())
    assert "optimizer state on nvme" in said
    assert "the disk binds" in said
    assert "compute is idle" in said
    assert "were not measured yet" in said
    assert data["explanation"]["binding"] == "nvme"
    changes = " ".join(item["change"] for item in data["explanation"]["alternatives"])
    assert "disks twice as fast" in changes
    assert "device memory again" in changes
    assert "host memory again" in changes
    assert "a batch twice as large" in changes
    assert sum(data["explanation"]["homes"].values()) == len(data["homes"])
    assert data["links"]["rates"]["nvme"]["read"] == 1e9
    used = data["tiers"]["host"]
    assert used["bytes"] == sum(used["items"].values()) <= used["budget"] == 1900 * KIB


def test_the_chosen_placement_is_no_slower_by_its_own_prediction_than_what_budgets_alone_suggest(
    tmp_path: Path,
) -> None:
    with start(config(tmp_path)) as engine:
        choice = engine.runtime.decision.choice
        assert choice is not None
        assert choice.placement is engine.runtime.placement
        assert choice.predicted.step_s <= choice.question.predict(choice.question.place()).step_s


def test_offload_keys_pin(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings["zero_optimization"] = {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    }
    with start(settings) as engine:
        assert {(s.param_tier, s.state_tier) for s in engine.runtime.segments} == {("nvme", "nvme")}
        said = str(engine.plan)
    assert "parameters on nvme: the configuration says so" in said
    assert "optimizer state on nvme: the configuration says so" in said


def test_nothing_is_measured_where_everything_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.zero.homes.choosing.learn_links", None)
    with start(config(tmp_path, device_bytes=None, host_bytes=None)) as engine:
        assert engine.plan.as_dict()["explanation"] is None
        assert "everything fits on the fastest tiers allowed" in str(engine.plan)


def test_state_that_is_kept_lies_where_the_next_process_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another measurement, the same homes."""
    homes = []
    for index, read in enumerate((1e7, 1e11)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{index}"))
        keep_profile(tmp_path, read=read, write=read)
        with initialize(build(), config=config(tmp_path / "state", keep_state=True), resume=False)[0] as engine:
            homes.append(engine.plan.placement["homes"])
    assert homes[0] == homes[1]


@pytest.mark.parametrize("absent", ["device", "host", "nvme"])
def test_a_plane_that_the_format_does_not_have_sways_nothing(tmp_path: Path, absent: str) -> None:
    wanted = {"exp_avg": "nvme", "exp_avg_sq": "nvme"}
    asked = config(tmp_path, placement=wanted | {"master": absent}) | {"zero_optimization": {"stage": 3}}
    with start(asked) as engine:
        assert {home.state for home in engine.runtime.placement.homes.values()} == {Tier.NVME}

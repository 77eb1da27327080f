"""Stripes in proportion to what the disks were measured to move: the arithmetic, and what a step's links count as then."""

import errno
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.aio_native import AsyncIO
from lamina.tiers import DiskSpeed, NvmePath
from lamina.tiers.links.bandwidth import DISK, disk_link
from lamina.tiers.links.device_identity import DeviceIdentity
from lamina.tiers.links.known_links import KnownLinks, learn_links
from lamina.tiers.placement.stripe_weights import ALIKE, device_shares, level, path_weights, weighted

GB = 1e9


def speed(read: float, write: float) -> DiskSpeed:
    return DiskSpeed(read=read, write=write, direct=True)


def paths(*weights: float) -> list[NvmePath]:
    return [NvmePath(path=f"/{'abcdef'[index]}", weight=weight) for index, weight in enumerate(weights)]


def test_a_mix_moves_what_its_seconds_say() -> None:
    disk = speed(3 * GB, 1.5 * GB)
    assert disk.mixed == pytest.approx(2e6 / disk.seconds(10**6, 10**6))
    assert disk.mixed == pytest.approx(2 * GB)


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({"a": 1.0, "b": 0.9}, {"a": 0.95, "b": 0.95}),
        ({"a": 1.0, "b": 0.8}, {"a": 1.0, "b": 0.8}),
        ({"a": 1.0, "b": 4.0, "c": 3.6, "d": 1.1}, {"a": 1.05, "b": 3.8, "c": 3.8, "d": 1.05}),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, {"a": 0.95, "b": 0.95, "c": 0.8}),
    ],
)
def test_rates_that_differ_by_noise_count_as_equal(rates: dict[str, float], wanted: dict[str, float]) -> None:
    assert level(rates) == pytest.approx(wanted)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_levelling_keeps_the_sum_the_order_and_each_rate_nearly(values: list[float]) -> None:
    rates = dict(enumerate(values))
    levelled = level(rates)
    assert sum(levelled.values()) == pytest.approx(sum(values))
    assert all(abs(levelled[key] / rate - 1) <= 1 / (1 - ALIKE) - 1 + 1e-9 for key, rate in rates.items())
    order = sorted(rates, key=rates.__getitem__)
    assert all(levelled[low] <= levelled[high] + 1e-12 for low, high in pairwise(order))


def test_paths_on_one_device_share_its_rate() -> None:
    devices = ["x", "y", "x"]
    weights = path_weights(devices, {"x": 2.0, "y": 3.0})
    assert weights == (1.0, 3.0, 1.0)
    assert device_shares(devices, weights) == {"x": 0.4, "y": 0.6}


def test_weights_follow_the_mix_of_each_disk() -> None:
    speeds = {"x": speed(3 * GB, 1.5 * GB), "y": speed(1 * GB, 1 * GB)}
    found, told = weighted(paths(1, 1, 1), ["x", "y", "x"], speeds)
    assert [path.weight / GB for path in found] == pytest.approx([1, 1, 1])
    found, told = weighted(paths(1, 1), ["x", "y"], speeds)
    assert [path.weight / GB for path in found] == pytest.approx([2, 1])
    assert told.startswith("stripes in proportion to these rates")


def test_weights_that_are_given_or_cannot_be_known_stay() -> None:
    speeds = {"x": speed(GB, GB), "y": speed(3 * GB, 3 * GB)}
    given, told = weighted(paths(1, 2), ["x", "y"], speeds)
    assert (list(given), told) == (paths(1, 2), "stripes by the paths' given weights")
    given, told = weighted(paths(1, 1), ["x", "z"], speeds)
    assert (list(given), told) == (paths(1, 1), "even stripes, since the disk of /b was not measured")
    assert weighted(paths(1, 1), ["x", "x"], speeds) == (tuple(paths(1, 1)), "")


def test_a_link_of_striped_disks_is_as_fast_as_the_one_that_ends_last() -> None:
    disks = [speed(3 * GB, 2 * GB), speed(1 * GB, 1 * GB)]
    even, fitting = disk_link(disks), disk_link(disks, [0.75, 0.25])
    assert (even.read.rate(), even.write.rate()) == (2 * GB, 2 * GB)
    assert fitting.read.rate() == 4 * GB
    assert fitting.write.rate() == pytest.approx(2 * GB / 0.75)


def learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[str, float | None]) -> KnownLinks:
    """Folders that are disks of their own, and a probe that finds these rates; None: it fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in rates:
        (tmp_path / name).mkdir()

    def identity(path: str) -> DeviceIdentity:
        return DeviceIdentity(machine="m", file_system="ext4", model="", serial=Path(path).name, capacity_bytes=1)

    def probe(_: AsyncIO, folder: Path, __: int) -> DiskSpeed:
        rate = rates[folder.name]
        if rate is None:
            raise OSError(errno.ENOSPC, "no room")
        return speed(rate, rate)

    monkeypatch.setattr("lamina.tiers.links.known_links.identify", identity)
    monkeypatch.setattr("lamina.tiers.links.known_links.probe_disk", probe)
    return learn_links([NvmePath(path=str(tmp_path / name)) for name in rates], AsyncIO, nbytes=1 << 30)


def test_what_is_learnt_of_unequal_disks_stripes_them_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = learn(tmp_path, monkeypatch, {"a": 3 * GB, "b": 1 * GB, "c": 0.95 * GB})
    weights = [path.weight for path in known.paths]
    assert weights == pytest.approx([3 * GB, 0.975 * GB, 0.975 * GB])
    assert sum(known.disk_shares) == pytest.approx(1)
    assert known.model.link(DISK).read.rate() == pytest.approx(0.95 * GB * 4.95 / 0.975, rel=1e-6)
    assert "in proportion to these rates" in known.source


def test_a_disk_that_cannot_be_measured_leaves_even_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = learn(tmp_path, monkeypatch, {"a": 3 * GB, "b": None})
    assert [path.weight for path in known.paths] == [1.0, 1.0]
    assert known.disk_shares == (1.0,)
    assert f"even stripes, since the disk of {tmp_path / 'b'} was not measured" in known.source


def test_a_single_path_is_told_nothing_about_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = learn(tmp_path, monkeypatch, {"a": 3 * GB})
    assert [path.weight for path in known.paths] == [1.0]
    assert "stripes" not in known.source

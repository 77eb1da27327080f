"""The profile file: what is written is read back, and what does not fit this machine is refused with the reason."""

import dataclasses
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from lamina.tiers.links.device_identity import DeviceIdentity, identify
from lamina.tiers.links.profile import (
    DiskProfile,
    ForeignProfileError,
    MachineRates,
    Profile,
    ProfileError,
    Rate,
    StaleProfileError,
    Together,
    check_profile,
    this_kernel,
)
from lamina.tiers.links.profile_file import cache_folder, load_profile, profile_path, read_profile, save_profile

NOW = 1_800_000_000.0
DAY = 86400.0


def rate(median: float) -> Rate:
    return Rate(median=median, low=0.9 * median, high=1.1 * median, samples=5)


def disk(identity: DeviceIdentity, **changes: Any) -> DiskProfile:
    values: dict[str, Any] = {
        "path": "/data",
        "identity": identity,
        "direct": True,
        "page_kind": "thp",
        "backend": "uring",
        "block_bytes": 1 << 20,
        "queue_depth": 32,
        "num_threads": 32,
        "files": 1,
        "read": rate(2.6e9),
        "write": rate(4.4e9),
        "mixed_read": rate(1.7e9),
        "mixed_write": rate(1.6e9),
        "read_share": 0.5,
        "read_latency_s": 4e-4,
        "write_latency_s": 2e-4,
        "first_write": 2.5e9,
    }
    return DiskProfile(**(values | changes))


def profile(*identities: DeviceIdentity, **changes: Any) -> Profile:
    values: dict[str, Any] = {
        "created": NOW,
        "processor": "a processor",
        "cores": 2,
        "disks": tuple(disk(identity) for identity in identities),
        "machine": MachineRates(stream=8e10, host_to_device=2.4e10, device_to_host=2.0e10, all_gather=2e9),
    }
    return Profile(**(values | changes))


@pytest.fixture
def here(tmp_path: Path) -> DeviceIdentity:
    return identify(tmp_path)


def other(identity: DeviceIdentity, **changes: Any) -> DeviceIdentity:
    return dataclasses.replace(identity, **({"serial": "another disk"} | changes))


def test_a_saved_profile_is_read_back_the_same(tmp_path: Path, here: DeviceIdentity) -> None:
    second = other(here)
    written = profile(here, second, together=Together(read=5e9, write=8e9, mixed_read=3e9, mixed_write=3e9))
    file = save_profile(written, tmp_path / "deep" / "profile.json")
    assert read_profile(file) == written
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert os.listdir(file.parent) == ["profile.json"]


def test_the_cache_folder_is_keyed_by_the_devices(
    tmp_path: Path, here: DeviceIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = save_profile(profile(here))
    assert file == tmp_path / "cache" / "lamina" / f"nvme-{here.key()}.json"
    assert load_profile([tmp_path], now=NOW) == profile(here)
    assert profile_path([here, other(here)]) == profile_path([other(here), here]) != file
    assert profile_path([here, here]) == file
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_folder() == Path.home() / ".cache" / "lamina"


def test_the_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "it's two words"
    folder.mkdir()
    with pytest.raises(ProfileError) as caught:
        load_profile([folder])
    command = str(caught.value).split("`")[1]
    assert shlex.split(command) == ["lamina", "nvme", "--save", str(folder)]


def test_a_profile_that_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ProfileError, match=r"cannot be read: Not a directory\. .*lamina nvme --save"):
        load_profile([tmp_path])


def test_no_profile_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ProfileError, match=rf"no profile .*nvme-.*json\. Run `lamina nvme --save {tmp_path}`"):
        load_profile([tmp_path], now=NOW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"serial": "x"}, r"serial was 'x', is "),
        ({"machine": "0" * 16}, r"machine was '0{16}', is "),
        ({"capacity_bytes": 5}, r"capacity_bytes was 5, is \d+"),
        ({"file_system": "befs"}, r"file_system was 'befs', is "),
    ],
)
def test_another_device_is_refused(tmp_path: Path, here: DeviceIdentity, changes: dict[str, Any], message: str) -> None:
    file = save_profile(profile(dataclasses.replace(here, **changes)), tmp_path / "p.json")
    with pytest.raises(ForeignProfileError, match=f"{message}.*Run `lamina nvme"):
        load_profile([tmp_path], file=file, now=NOW)


@pytest.mark.parametrize(
    ("now", "kernel", "message"),
    [
        (NOW + 91 * DAY, "", "91 days old, 90 at most"),
        (NOW - 3 * DAY, "", "3 days in the future"),
        (NOW, "6.0.0", r"measured under Linux .*, this is 6\.0\.0"),
    ],
)
def test_a_stale_profile_is_refused(here: DeviceIdentity, now: float, kernel: str, message: str) -> None:
    fresh = profile(here)
    check_profile(fresh, {"/d": here}, now=NOW + 89 * DAY, kernel=this_kernel())
    with pytest.raises(StaleProfileError, match=f"{message}.*Run `lamina nvme --save /d`"):
        check_profile(fresh, {"/d": here}, now=now, kernel=kernel or this_kernel())


def change(file: Path, keys: list[str | int], value: Any) -> None:
    data = json.loads(file.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("keys", "value", "kind", "message"),
    [
        (["format"], 99, ForeignProfileError, "format 99, this lamina reads 1"),
        (["format"], KeyError, ProfileError, "no key 'format'"),
        (["speed"], 1, ForeignProfileError, "unknown speed: another layout of keys"),
        (["disks", 0, "read"], KeyError, ForeignProfileError, r"disks\[0\]: missing read"),
        (["disks", 0, "read", "median"], "fast", ForeignProfileError, r"disks\[0\]\.read\.median: want float"),
        (["disks", 0, "queue_depth"], True, ForeignProfileError, r"queue_depth: want int, got True"),
        (["disks", 0, "queue_depth"], 0, ProfileError, "queue_depth is 0: must be at least 1"),
        (["disks", 0, "read", "median"], -1.0, ProfileError, "must be positive, finite and in order"),
        (["disks", 0, "read", "low"], 1e12, ProfileError, "in order"),
        (["disks", 0, "read_share"], 1.0, ProfileError, "read_share is 1.0"),
        (["disks"], [], ProfileError, "at least one disk"),
        (["disks"], {}, ForeignProfileError, "disks: want a list"),
        (["disks", 0], 3, ForeignProfileError, r"disks\[0\]: want an object"),
        (["machine", "copy"], 0, ProfileError, "copy is 0.0: must be positive"),
    ],
)
def test_another_layout_is_refused(
    tmp_path: Path, here: DeviceIdentity, keys: list[str | int], value: Any, kind: type[Exception], message: str
) -> None:
    file = save_profile(profile(here), tmp_path / "p.json")
    change(file, keys, value)
    with pytest.raises(kind, match=message) as caught:
        read_profile(file)
    assert str(file) in str(caught.value)
    assert type(caught.value) is kind


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"format": 1e999}'])
def test_what_is_no_profile_is_said_so(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=r"p\.json"):
        read_profile(file)


def test_huge_and_strange_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ProfileError, match="regular file"):
        read_profile(tmp_path / "fifo")
    with open(tmp_path / "big", "wb") as big:
        big.truncate(1 << 30)
    with pytest.raises(ProfileError, match="regular file of at most"):
        read_profile(tmp_path / "big")


def test_a_failed_save_leaves_the_old_profile(
    tmp_path: Path, here: DeviceIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_profile(profile(here), tmp_path / "p.json")
    before = file.read_bytes()

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        save_profile(profile(here, cores=64), file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.json"]


def test_the_disk_of_a_path_and_what_consumers_take(tmp_path: Path, here: DeviceIdentity) -> None:
    found = profile(here).disk(tmp_path / "not" / "there" / "yet")
    speed = found.speed()
    assert (speed.read, speed.write, speed.direct) == (2.6e9, 4.4e9, True)
    assert found.mix_gain == pytest.approx(1.7 / 2.6 + 1.6 / 4.4)
    assert not found.full_duplex
    with pytest.raises(ForeignProfileError, match=r"lies on .*; this profile has another"):
        profile(other(here, model="another")).disk(tmp_path)


def test_planner_rates_count_a_disk_once_and_prefer_what_was_measured_together(here: DeviceIdentity) -> None:
    second = other(here)
    assert profile(here, here).planner_rates() == {
        "nvme_read_bandwidth": 2.6e9,
        "nvme_write_bandwidth": 4.4e9,
        "nvme_full_duplex": False,
        "drives": 1,
        "host_bandwidth": 8e10,
        "link_bandwidth": 2.0e10,
        "peer_bandwidth": 2e9,
    }
    assert profile(here, second).planner_rates()["nvme_read_bandwidth"] == 5.2e9
    both = profile(here, second, together=Together(read=3e9, write=5e9, mixed_read=2e9, mixed_write=2e9))
    rates = both.planner_rates()
    assert (rates["nvme_read_bandwidth"], rates["nvme_write_bandwidth"], rates["drives"]) == (3e9, 5e9, 2)


def test_full_duplex_is_a_mix_that_hardly_slows_down(here: DeviceIdentity) -> None:
    fast = disk(here, mixed_read=rate(2.4e9), mixed_write=rate(4.0e9))
    assert fast.full_duplex
    assert profile(here, disks=(fast,)).planner_rates()["nvme_full_duplex"] is True


def test_the_planner_takes_the_rates(here: DeviceIdentity) -> None:
    from lamina.engine.planner import this_machine

    machine = this_machine(rates=profile(here).planner_rates())
    assert machine.nvme_read_bandwidth == 2.6e9
    assert machine.nvme_write_bandwidth == 4.4e9
    assert machine.host_bandwidth == 8e10
    assert machine.nvme_full_duplex is False

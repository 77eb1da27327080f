"""Which disk lies under a path, read from a made-up /proc and /sys."""

import os
from pathlib import Path

import pytest

from lamina.tiers.links.device_identity import existing_parent, identify, machine_key

DEVICE = os.makedev(259, 1)


@pytest.fixture
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever this machine has its temporary files."""
    monkeypatch.setattr("lamina.tiers.links.device_identity._file_device", lambda _: DEVICE)


def make_root(root: Path, *, files: dict[str, str], file_system: str = "ext4", source: str = "/dev/x1") -> None:
    """A tree in which the disk with the number DEVICE is described by `files` of its sysfs folder; it is a partition there."""
    disk = root / "sys" / "devices" / "pci" / "block" / "nvme0n1"
    partition = disk / "nvme0n1p1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    for name, text in files.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(text + "\n")
    links = root / "sys" / "dev" / "block"
    links.mkdir(parents=True)
    (links / f"{os.major(DEVICE)}:{os.minor(DEVICE)}").symlink_to(partition)
    proc = root / "proc" / "self"
    (proc / "fdinfo").mkdir(parents=True)
    for fd in range(200):
        (proc / "fdinfo" / str(fd)).write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t27\n")
    (proc / "mountinfo").write_text(
        f"26 1 0:5 / /sys rw - sysfs sysfs rw\n27 1 254:0 / / rw,relatime shared:1 - {file_system} {source} rw\n"
    )
    (root / "etc").mkdir()
    (root / "etc" / "machine-id").write_text("0123456789abcdef\n")


FILES = {"device/model": "Fast SSD", "serial": "S123", "size": "2048"}


@pytest.mark.usefixtures("_on_a_disk")
def test_a_partition_is_named_by_its_disk(tmp_path: Path) -> None:
    make_root(tmp_path / "root", files=FILES)
    found = identify(tmp_path, root=tmp_path / "root")
    assert (found.model, found.serial, found.capacity_bytes, found.file_system) == ("Fast SSD", "S123", 1 << 20, "ext4")
    assert found.machine == machine_key(tmp_path / "root")
    assert "0123456789abcdef" not in str(found) + found.machine


@pytest.mark.usefixtures("_on_a_disk")
@pytest.mark.parametrize(
    ("files", "serial"),
    [
        ({"device/serial": "D1", "size": "8"}, "D1"),
        ({"wwid": "eui.01", "size": "8"}, "eui.01"),
        ({"dm/uuid": "LVM-abc", "size": "8"}, "LVM-abc"),
        ({"md/uuid": "a:b", "size": "8"}, "a:b"),
        ({"serial": "", "wwid": "second", "size": "8"}, "second"),
    ],
)
def test_the_serial_number_is_looked_for_in_several_places(tmp_path: Path, files: dict[str, str], serial: str) -> None:
    make_root(tmp_path / "root", files=files)
    found = identify(tmp_path, root=tmp_path / "root")
    assert (found.serial, found.model) == (serial, "nvme0n")


@pytest.mark.usefixtures("_on_a_disk")
def test_every_field_changes_the_key(tmp_path: Path) -> None:
    keys = set()
    for number, changed in enumerate(
        [{}, {"device/model": "Slow SSD"}, {"serial": "S124"}, {"size": "4096"}],
    ):
        root = tmp_path / str(number)
        make_root(root, files=FILES | changed)
        keys.add(identify(tmp_path, root=root).key())
    make_root(tmp_path / "fs", files=FILES, file_system="xfs")
    keys.add(identify(tmp_path, root=tmp_path / "fs").key())
    (tmp_path / "fs" / "etc" / "machine-id").write_text("another\n")
    keys.add(identify(tmp_path, root=tmp_path / "fs").key())
    assert len(keys) == 6
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys)


@pytest.mark.usefixtures("_on_a_disk")
def test_without_a_disk_the_source_and_size_of_the_file_system_count(tmp_path: Path) -> None:
    make_root(tmp_path / "root", files=FILES, file_system="nfs4", source="server:/export")
    for link in (tmp_path / "root" / "sys" / "dev" / "block").iterdir():
        link.unlink()
    found = identify(tmp_path, root=tmp_path / "root")
    space = os.statvfs(tmp_path)
    assert (found.file_system, found.serial, found.model) == ("nfs4", "server:/export", "")
    assert found.capacity_bytes == space.f_blocks * space.f_frsize


def test_this_machine_answers_the_same_twice_and_below_folders_that_do_not_exist(tmp_path: Path) -> None:
    assert identify(tmp_path) == identify(tmp_path / "a" / "b")
    assert existing_parent(tmp_path / "a" / "b") == tmp_path


def test_tmpfs_is_another_device_than_the_disk(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    assert identify(memory).file_system == "tmpfs"
    assert identify(memory).key() != identify(tmp_path).key()

"""The folder for state: made private, taken away again, and never anybody else's."""

import os
from pathlib import Path

import pytest

from lamina.bench.state_folder import StateFolder


def test_missing_folders_are_made_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b c" / "ü"
    with StateFolder(path, option="--nvme-path"):
        assert path.is_dir()
        assert {folder.stat().st_mode & 0o777 for folder in (path, path.parent, path.parents[1])} == {0o700}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir(mode=0o755)
    with StateFolder(path, option="--nvme-path"):
        pass
    assert path.stat().st_mode & 0o777 == 0o755


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with StateFolder(path, option="--nvme-path"):
        (path / "theirs").write_text("keep")
    assert (path / "theirs").read_text() == "keep"


def test_the_folder_goes_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), StateFolder(tmp_path / "new", option="--nvme-path"):
        raise ValueError("inside")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(NotADirectoryError, match=r"--nvme-path: Not a directory.*file"),
        StateFolder(tmp_path / "file", option="--nvme-path"),
    ):
        pass
    with (
        pytest.raises(OSError, match="--nvme-path: File name too long"),
        StateFolder(tmp_path / "new" / ("x" * 300), option="--nvme-path"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "closed"
    path.mkdir(mode=0o555)
    with pytest.raises(PermissionError, match="closed"), StateFolder(path, option="--nvme-path"):
        pass


def test_a_read_only_file_system_is_refused() -> None:
    path = Path("/sys/kernel")
    if not path.is_dir() or not os.statvfs(path).f_flag & os.ST_RDONLY:
        pytest.skip("/sys is not mounted read-only")
    with pytest.raises(OSError, match="Read-only file system"), StateFolder(path / "x", option="--nvme-path"):
        pass

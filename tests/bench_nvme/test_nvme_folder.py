"""The private folder: closed to others, gone afterwards, and leftovers are removed only when they are ours."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from lamina.bench.nvme.folder import LOCK, MARK, FolderError, PrivateFolder, remove_leftovers

NAME = ".lamina-nvme-0123456789abcdef"


def leave_behind(parent: Path, name: str = NAME, *, mark: bytes = MARK, mode: int = 0o700) -> Path:
    """What a killed run leaves."""
    folder = parent / name
    folder.mkdir()
    (folder / LOCK).write_bytes(mark)
    (folder / "data-0.bin").write_bytes(b"x" * 100)
    (folder / "data-1-2.bin").write_bytes(b"")
    folder.chmod(mode)
    return folder


def test_it_is_closed_to_others_and_gone_afterwards(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder:
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(folder.path / LOCK).st_mode) == 0o600
        assert folder.path.parent == tmp_path
        folder.data_file("data", 3).write_bytes(b"1")
        folder.data_file("data", 3, 1).write_bytes(b"1")
    assert os.listdir(tmp_path) == []
    folder.close()


def test_it_is_gone_after_an_error_too(tmp_path: Path) -> None:
    def work() -> None:
        with PrivateFolder(tmp_path) as folder:
            folder.data_file("data", 0).write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert os.listdir(tmp_path) == []


def test_leftovers_are_removed_and_told(tmp_path: Path) -> None:
    left = leave_behind(tmp_path)
    (tmp_path / "precious").mkdir()
    with PrivateFolder(tmp_path) as folder:
        assert folder.removed == [str(left)]
        assert folder.kept == []
    assert os.listdir(tmp_path) == ["precious"]


def test_a_run_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as first:
        with PrivateFolder(tmp_path) as second:
            assert (second.removed, second.kept) == ([], [])
        assert first.path.is_dir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "thesis.tex").write_bytes(b"text"), "holds 'thesis.tex', which is not ours"),
        (lambda folder: (folder / LOCK).write_bytes(b"another program's"), "was not written by lamina"),
        (lambda folder: folder.chmod(0o755), "its mode is 755, ours have 700"),
    ],
)
def test_what_only_looks_like_ours_is_kept_and_told(tmp_path: Path, change: object, reason: str) -> None:
    left = leave_behind(tmp_path)
    change(left)  # type: ignore[operator]
    before = sorted(os.listdir(left))
    removed, kept = remove_leftovers(tmp_path)
    assert removed == []
    assert len(kept) == 1
    assert reason in kept[0]
    assert str(left) in kept[0]
    assert sorted(os.listdir(left)) == before


def test_other_names_links_and_files_are_not_touched(tmp_path: Path) -> None:
    target = leave_behind(tmp_path, "not-ours")
    (tmp_path / NAME).symlink_to(target)
    (tmp_path / NAME.replace("0", "9")).write_bytes(b"a file")
    removed, kept = remove_leftovers(tmp_path)
    assert removed == []
    assert sorted("not a folder" in sentence for sentence in kept) == [True, True]
    assert sorted(os.listdir(target)) == ["data-0.bin", "data-1-2.bin", LOCK]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_leftover_is_kept(tmp_path: Path) -> None:
    left = leave_behind(tmp_path)
    os.chown(left, 12345, 12345)
    removed, kept = remove_leftovers(tmp_path)
    assert removed == []
    assert "belongs to user 12345" in kept[0]


def test_a_folder_that_was_just_made_without_a_lock_is_not_taken_away(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(mode=0o700)
    assert remove_leftovers(tmp_path) == ([], [])
    assert (tmp_path / NAME).is_dir()
    os.utime(tmp_path / NAME, (1, 1))
    assert remove_leftovers(tmp_path) == ([str(tmp_path / NAME)], [])


def test_the_lock_is_what_says_alive(tmp_path: Path) -> None:
    left = leave_behind(tmp_path)
    fd = os.open(left / LOCK, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert remove_leftovers(tmp_path) == ([], [])
    os.close(fd)
    assert remove_leftovers(tmp_path) == ([str(left)], [])


def test_parents_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"cannot work in .*/gone: .*mkdir -p"):
        PrivateFolder(tmp_path / "gone")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FolderError, match="file is not a folder"):
        PrivateFolder(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_only_names_of_ours_can_be_made(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder, pytest.raises(ValueError, match="no name of a data file"):
        folder.data_file("../escape", 1)

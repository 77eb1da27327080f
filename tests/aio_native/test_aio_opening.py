"""Opening: creation, modes, preallocation, links, kinds of files, and what is said when direct I/O is not to be had."""

import errno
import os
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.aio_native import AsyncIO, AsyncIOError, BufferedIOWarning, ClosedIOError


def test_a_new_file_is_private_and_has_its_size_and_space(io: AsyncIO, path: Path) -> None:
    with io.open(path, create=True, size=1_000_001) as file:
        assert (file.size, file.preallocated) == (1_000_001, True)
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= 1_000_001
    with io.open(path, writable=True, size=3_000_000, sparse=True) as file:
        assert (file.size, file.preallocated) == (3_000_000, False)
        assert path.stat().st_blocks * 512 < 2_000_000


def test_a_reused_file_keeps_its_bytes(io: AsyncIO, path: Path) -> None:
    path.write_bytes(b"kept" * 1000)
    with io.open(path, create=True, size=6000) as file:
        assert file.size == 6000
    assert path.read_bytes() == b"kept" * 1000 + bytes(2000)
    with io.open(path, writable=True, size=10):
        pass
    assert path.read_bytes() == b"keptkeptke"
    with pytest.raises(AsyncIOError, match="EEXIST"):
        io.open(path, create=True, exclusive=True)
    assert path.read_bytes() == b"keptkeptke"


def test_create_does_not_follow_a_symbolic_link(io: AsyncIO, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"somebody else's")
    link.symlink_to(target)
    with pytest.raises(AsyncIOError) as caught:
        io.open(link, create=True, size=5)
    assert caught.value.errno == errno.ELOOP
    assert target.read_bytes() == b"somebody else's"


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "under a file"])
def test_what_cannot_be_opened_is_named(io: AsyncIO, tmp_path: Path, kind: str) -> None:
    #
    path = tmp_path / "spaces and ünïcode"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "under a file":
        path.write_bytes(b"")
        path = path / "inner"
    with pytest.raises(AsyncIOError) as caught:
        io.open(path)
    expected = {"missing": errno.ENOENT, "under a file": errno.ENOTDIR}.get(kind, errno.EINVAL)
    assert (caught.value.errno, caught.value.path) == (expected, str(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_too_large_is_refused_at_the_start_and_leaves_nothing(io: AsyncIO, path: Path) -> None:
    with pytest.raises(AsyncIOError, match="cannot reserve") as caught:
        io.open(path, create=True, size=1 << 60)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert caught.value.wanted == 1 << 60
    assert not path.exists()
    path.write_bytes(b"precious")
    with pytest.raises(AsyncIOError, match="cannot reserve"):
        io.open(path, writable=True, size=1 << 60)
    assert path.read_bytes() == b"precious"


def test_size_needs_a_writable_file(io: AsyncIO, path: Path) -> None:
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match="writable"):
        io.open(path, size=5)
    with pytest.raises(ValueError, match="at least 0"):
        io.open(path, create=True, size=-1)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A directory on tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_tmpfs_is_buffered_and_says_so_once(io: AsyncIO, memory_folder: Path) -> None:
    #
    path = memory_folder / "data.bin"
    with pytest.warns(BufferedIOWarning, match="page cache.*tmpfs"):
        file = io.open(path, create=True, size=100_001)
    data = os.urandom(100_001)
    assert not file.direct
    assert io.write(file, data).wait() == 100_001
    back = bytearray(100_000)
    assert io.read(file, back, 1).wait() == 100_000
    assert back == data[1:]
    file.close()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        io.open(path).close()  # once for each AsyncIO
        io.open(path, direct=False).close()
    assert seen == []
    with pytest.raises(AsyncIOError, match="tmpfs") as caught:
        io.open(path, direct=True)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_direct_and_buffered_files_hold_the_same_bytes(io: AsyncIO, path: Path) -> None:
    data = os.urandom(1_234_567)
    with io.open(path, create=True) as direct, io.open(path, writable=True, direct=False) as buffered:
        assert not buffered.direct
        assert buffered.alignment == 1
        for writer, reader in ((direct, buffered), (buffered, direct)):
            io.write(writer, data[:100_000], 7).wait()
            io.write(writer, data, 0).wait()
            io.fsync(writer).wait()
            back = bytearray(len(data))
            io.read(reader, back).wait()
            assert back == data


def test_a_closed_file_is_refused(io: AsyncIO, path: Path) -> None:
    file = io.open(path, create=True, size=4096)
    file.close()
    file.close()
    for attempt in (lambda: io.read(file, bytearray(1)), lambda: io.fsync(file), lambda: file.size):
        with pytest.raises(ClosedIOError, match=str(path)):
            attempt()


def test_a_file_for_reading_refuses_writes(io: AsyncIO, path: Path) -> None:
    path.write_bytes(b"abc")
    with io.open(path) as file:
        with pytest.raises(AsyncIOError, match="writable=True") as caught:
            io.write(file, b"x")
        assert caught.value.errno == errno.EBADF
    assert path.read_bytes() == b"abc"


def test_bad_buffers_and_offsets_are_refused(io: AsyncIO, make_io: object, path: Path) -> None:
    with io.open(path, create=True, size=4096) as file:
        with pytest.raises((TypeError, BufferError, ValueError)):
            io.read(file, b"read only")
        with pytest.raises((TypeError, BufferError, ValueError)):
            io.read(file, memoryview(bytearray(10))[::2])
        with pytest.raises(ValueError, match="at least 0"):
            io.read(file, bytearray(1), -1)
        with pytest.raises(AsyncIOError) as caught:
            io.read(file, bytearray(2), (1 << 63) - 1)
        assert caught.value.errno == errno.EOVERFLOW
        with AsyncIO() as other, pytest.raises(ValueError, match="another AsyncIO"):
            other.read(file, bytearray(1))


@pytest.mark.root
def test_a_full_disk_shows_at_open_and_as_one_clear_error_later(io: AsyncIO, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]} failed: {done.stderr.strip()}")
    try:
        with pytest.raises(AsyncIOError, match="bytes are free") as caught:
            io.open(mount / "a", create=True, size=64 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert not (mount / "a").exists()
        with io.open(mount / "b", create=True, size=64 << 20, sparse=True) as sparse:
            handle = io.write(sparse, bytes(64 << 20))
            with pytest.raises(AsyncIOError, match="ENOSPC") as caught:
                handle.wait()
            assert caught.value.wanted == 64 << 20
            assert caught.value.got is not None
            assert caught.value.got < 16 << 20
            assert io.read(sparse, bytearray(4096)).wait() == 4096  # all goes on
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
def test_a_block_device_is_direct_to_its_last_byte(io: AsyncIO, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate((8 << 20) + 512)  # the last page of the device is not whole
    done = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"losetup failed: {done.stderr.strip()}")
    device = done.stdout.strip()
    try:
        with io.open(device, writable=True) as file:
            assert file.direct
            end, data = file.size, os.urandom(1_000_003)
            for offset in (0, 777, end - len(data)):
                assert io.write(file, data, offset).wait() == len(data)
                back = bytearray(len(data))
                assert io.read(file, back, offset).wait() == len(data)
                assert back == data
            with pytest.raises(AsyncIOError) as caught:
                io.write(file, data, end - 1000).wait()
            assert (caught.value.errno, caught.value.got) == (errno.ENOSPC, 1000)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)

"""Checks of file I/O: each backend carries out real transfers, memory is really registered, pages are really touched."""

import contextlib
import errno
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lamina.aio_native import (
    AlignedBuffer,
    AsyncIO,
    AsyncIOError,
    BackendUnavailableError,
    crc32c,
    crc32c_path,
)
from lamina.bench.doctor.finding import Finding, State, first_line
from lamina.bench.report import format_bytes

SECTION = "file I/O"
TRANSFER_BYTES = 1 << 20
REGISTER_BYTES = 32 << 20
HUGE_BYTES = 8 << 20
FEW_FILES = 256
SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")
HUGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def finding(name: str, state: State, text: str, mend: str = "") -> Finding:
    """A finding of this section."""
    return Finding(section=SECTION, name=name, state=state, text=text, mend=mend)


def check_backends(folder: Path) -> Iterator[Finding]:
    """io_uring and threads, by writing and reading a file in `folder`; and which of them "auto" takes."""
    for backend, name in (("uring", "io_uring"), ("threads", "threads")):
        try:
            yield finding(name, State.OK, round_trip(backend, folder))
        except BackendUnavailableError as error:
            state = State.WARN if backend == "uring" else State.FAIL
            yield finding(name, state, str(error), mend_backend(error))
        except AsyncIOError as error:
            yield finding(name, State.FAIL, f"a transfer failed: {error}", "see `dmesg`; try another folder")
    with AsyncIO(queue_depth=2) as io:
        state = State.OK if io.backend == "uring" else State.WARN
        yield finding("backend", state, f'"auto" takes {io.backend}: {first_line(ValueError(io.backend_reason))}')


def round_trip(backend: str, folder: Path) -> str:
    """Write random bytes, read them back into other memory and compare; what was done, in words.

    Raises AsyncIOError when something fails, and when other bytes come back.
    """
    content = os.urandom(TRANSFER_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix=".lamina-doctor-", dir=folder) as private,
        AsyncIO(backend=backend, queue_depth=4, block_bytes=256 << 10) as io,  # type: ignore[arg-type]
        AlignedBuffer(2 * TRANSFER_BYTES) as buffer,
    ):
        path = Path(private) / "data.bin"
        with io.open(path, create=True, size=TRANSFER_BYTES) as file:
            buffer.view[:TRANSFER_BYTES] = content
            io.write(file, buffer.view[:TRANSFER_BYTES]).wait()
            io.fsync(file).wait()
            io.read(file, buffer.view[TRANSFER_BYTES:]).wait()
            how = "direct" if file.direct else "buffered"
        if bytes(buffer.view[TRANSFER_BYTES:]) != content:
            raise AsyncIOError(errno.EIO, f"{backend}: other bytes came back than were written to {path}")
    return f"works: 1 MiB written and read back ({how}) in {folder}"


def mend_backend(error: BackendUnavailableError) -> str:
    """The command that most likely makes a backend available."""
    if error.errno == errno.ENOSYS and "built without" in str(error):
        return "apt install liburing-dev pkg-config && pip install --force-reinstall --no-binary lamina lamina"
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        setting = SYSCTL.read_text().strip() if SYSCTL.exists() else "absent"
        if setting in ("1", "2"):
            return "sudo sysctl -w kernel.io_uring_disabled=0"
        return (
            "in a container: run it with a seccomp profile that allows io_uring "
            "(docker run --security-opt seccomp=unconfined …)"
        )
    if error.errno == errno.ENOMEM:
        return mend_memlock()
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "ulimit -n 65536"
    return "pip install --force-reinstall lamina"


def mend_memlock() -> str:
    """How to raise RLIMIT_MEMLOCK: by the shell up to the hard limit, else where that limit is set."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY:
        return "ulimit -l unlimited"
    if hard >= 2 * REGISTER_BYTES:
        return f"ulimit -l {hard // 1024}"
    return (
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf  # and log in again "
        "(docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    )


def check_liburing() -> Iterator[Finding]:
    """Which liburing is loaded, by the mappings of this process after a ring was made."""
    with contextlib.suppress(BackendUnavailableError):  # check_backends tells
        AsyncIO(backend="uring", queue_depth=2).close()
    names = set(re.findall(r"/\S*liburing\S*", Path("/proc/self/maps").read_text()))
    versions = sorted(os.path.basename(os.path.realpath(name)) for name in names)
    if versions:
        yield finding("liburing", State.OK, f"{', '.join(versions)} is loaded")
    elif re.search(r"_uring\S*\.so", Path("/proc/self/maps").read_text()):
        yield finding("liburing", State.OK, "linked into lamina's own extension")
    else:
        yield finding(
            "liburing",
            State.WARN,
            "lamina was built without it",
            "apt install liburing-dev pkg-config && pip install --force-reinstall --no-binary lamina lamina",
        )


def check_registration() -> Iterator[Finding]:
    """Registering memory with the kernel, tried with a real buffer; RLIMIT_MEMLOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    try:
        with AsyncIO(backend="uring", queue_depth=2) as io, AlignedBuffer(REGISTER_BYTES) as buffer:
            done = io.register(buffer.view)
    except BackendUnavailableError:
        yield finding("registered buffers", State.INFO, f"only with io_uring (RLIMIT_MEMLOCK {limit})")
        return
    size = format_bytes(REGISTER_BYTES)
    if done:
        yield finding("registered buffers", State.OK, f"{size} registered; RLIMIT_MEMLOCK {limit}")
        return
    text = f"{size} could not be registered; RLIMIT_MEMLOCK {limit}: more CPU time"
    yield finding("registered buffers", State.WARN, text, mend_memlock())


def check_pages() -> Iterator[Finding]:
    """Which pages a buffer really gets once all of it is touched."""
    with AlignedBuffer(HUGE_BYTES) as buffer:
        buffer.view[:] = bytes(HUGE_BYTES)
        kind = buffer.page_kind
    if kind != "small":
        yield finding("huge pages", State.OK, f"buffers are made of them ({kind})")
        return
    setting = HUGE_PAGE_SETTING.read_text().strip() if HUGE_PAGE_SETTING.exists() else "absent"
    mend = f"echo madvise | sudo tee {HUGE_PAGE_SETTING}"
    if "[madvise]" in setting or "[always]" in setting:
        mend = "free some memory: echo 1 | sudo tee /proc/sys/vm/compact_memory"
    yield finding("huge pages", State.WARN, f"none to be had ({setting}): disks can be half as fast", mend)


def check_limits() -> Iterator[Finding]:
    """Open files, and the checksum's code path against its known answer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    yield finding(
        "open files", State.WARN if few else State.OK, f"RLIMIT_NOFILE {soft}", "ulimit -n 65536" if few else ""
    )
    right = crc32c(b"123456789") == 0xE3069283
    yield finding(
        "checksum",
        State.OK if right else State.FAIL,
        f"crc32c on path {crc32c_path()} gives the {'right' if right else 'WRONG'} answer",
        "" if right else "pip install --force-reinstall lamina",
    )

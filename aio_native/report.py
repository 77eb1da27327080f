"""What this machine offers for file I/O: found by doing, printable, as data."""

import os
import platform
import resource
import tempfile
from dataclasses import asdict, dataclass
from os import PathLike, fsdecode
from typing import Any

from .async_io import AsyncIO
from .buffers import HUGE_PAGE, AlignedBuffer
from .checksum import crc32c_path
from .errors import AsyncIOError, errno_name
from .native import sysctl_setting

SETUP_FLAGS = {
    1 << 3: "CQSIZE",
    1 << 4: "CLAMP",
    1 << 7: "SUBMIT_ALL",
    1 << 8: "COOP_TASKRUN",
    1 << 12: "SINGLE_ISSUER",
    1 << 13: "DEFER_TASKRUN",
}
PROBE_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class PathReport:
    """How files in one directory can be reached."""

    path: str
    file_system: str
    direct: bool
    alignment: int
    """Bytes."""
    preallocated: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """The answer of backend_report()."""

    backend: str
    reason: str
    kernel: str
    setup_flags: tuple[str, ...]
    """IORING_SETUP_* that the kernel accepted."""
    refused_flags: tuple[str, ...]
    """IORING_SETUP_* that would have paid and that it refused."""
    fixed_files: bool
    fixed_buffers: bool
    fixed_refusal: str
    """errno with which the kernel refused registered files or buffers; empty when it did not."""
    sysctl: str
    memlock_bytes: int
    """RLIMIT_MEMLOCK, soft; -1: no limit."""
    open_files: int
    """RLIMIT_NOFILE, soft."""
    page_kind: str
    """What a buffer of one huge page was made of."""
    checksum: str
    """Code path of crc32c."""
    path: PathReport | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        refused = f"; refused by the kernel: {' '.join(self.refused_flags)}" if self.refused_flags else ""
        because = f"; the kernel refused with {self.fixed_refusal}" if self.fixed_refusal else ""
        lines = [
            f"backend        {self.backend} ({self.reason})",
            f"kernel         {self.kernel}; {self.sysctl}",
            f"ring flags     {' '.join(self.setup_flags) or 'none'}{refused}",
            f"registered     files {_yes(self.fixed_files)}, buffers {_yes(self.fixed_buffers)}{because}",
            f"limits         RLIMIT_MEMLOCK {self.memlock_bytes}, RLIMIT_NOFILE {self.open_files}",
            f"buffers        {self.page_kind} pages",
            f"crc32c         {self.checksum}",
        ]
        if self.path:
            how = f"direct, alignment {self.path.alignment}" if self.path.direct else "buffered (cached)"
            space = "can be reserved" if self.path.preallocated else "cannot be reserved"
            lines.append(f"{self.path.path}  {self.path.file_system}: {how}; {self.path.reason}; space {space}")
        return "\n".join(lines)


def _flag_names(flags: int) -> tuple[str, ...]:
    return tuple(name for bit, name in SETUP_FLAGS.items() if flags & bit)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _page_kind() -> str:
    with AlignedBuffer(HUGE_PAGE) as buffer:
        return buffer.page_kind


def _probe_path(io: AsyncIO, path: str) -> PathReport:
    """Writes and reads one small file in the directory (or beside the file) and removes it."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    fd, name = tempfile.mkstemp(prefix=".lamina-probe-", dir=folder)
    os.close(fd)
    direct, reason = None, ""
    try:
        with AlignedBuffer(PROBE_BYTES) as buffer:
            for direct in (None, False):
                with io.open(name, writable=True, size=PROBE_BYTES, direct=direct) as file:
                    found = PathReport(
                        path=path,
                        file_system=file.file_system,
                        direct=file.direct,
                        alignment=file.alignment,
                        preallocated=file.preallocated,
                        reason=reason or file.reason,
                    )
                    try:
                        io.write(file, buffer.view).wait()
                        io.read(file, buffer.view).wait()
                    except AsyncIOError as error:
                        if not file.direct:
                            raise
                        reason = f"a direct transfer failed: {error}"
                        continue
                    return found
    finally:
        os.unlink(name)
    raise AssertionError("the loop returns or raises")


def backend_report(path: str | PathLike[str] | None = None) -> BackendReport:
    """Starts the engine that "auto" would take, looks at what it found, and tries the directory `path` if given.

    Raises AsyncIOError when nothing can be written there.
    """
    with AsyncIO(queue_depth=4) as io:
        features = io.features()
        refusal = features["fixed_buffers_error"] or features["fixed_files_error"]
        found = _probe_path(io, fsdecode(path)) if path is not None else None
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return BackendReport(
            backend=io.backend,
            reason=io.backend_reason,
            kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
            setup_flags=_flag_names(features["setup_flags"]),
            refused_flags=_flag_names(features["refused_flags"]),
            fixed_files=features["fixed_files"] > 0,
            fixed_buffers=features["fixed_buffers"] > 0,
            fixed_refusal=errno_name(refusal) if refusal else "",
            sysctl=sysctl_setting(),
            memlock_bytes=-1 if memlock == resource.RLIM_INFINITY else memlock,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            page_kind=_page_kind(),
            checksum=crc32c_path(),
            path=found,
        )

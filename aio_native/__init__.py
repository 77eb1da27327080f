"""File I/O as fast as the device: asynchronous, direct, any size and alignment, io_uring or POSIX threads."""

from .async_io import AsyncIO
from .buffers import AlignedBuffer
from .checksum import crc32c, crc32c_join, crc32c_path
from .errors import (
    AsyncIOError,
    AsyncIOWarning,
    BackendUnavailableError,
    BufferedIOWarning,
    CancelledIOError,
    ClosedIOError,
    ForkedIOError,
    PreallocationWarning,
    RegistrationWarning,
    ShortIOError,
    UnseenErrorWarning,
)
from .files import File
from .handle import Handle
from .report import BackendReport, PathReport, backend_report
from .request import Priority, Read, Write
from .stats import DeviceStats, DirectionStats, IOStats

__all__ = [
    "AlignedBuffer",
    "AsyncIO",
    "AsyncIOError",
    "AsyncIOWarning",
    "BackendReport",
    "BackendUnavailableError",
    "BufferedIOWarning",
    "CancelledIOError",
    "ClosedIOError",
    "DeviceStats",
    "DirectionStats",
    "File",
    "ForkedIOError",
    "Handle",
    "IOStats",
    "PathReport",
    "PreallocationWarning",
    "Priority",
    "Read",
    "RegistrationWarning",
    "ShortIOError",
    "UnseenErrorWarning",
    "Write",
    "backend_report",
    "crc32c",
    "crc32c_join",
    "crc32c_path",
]

"""Asynchronous file I/O: requests of any size and alignment, done in the background by a native engine."""

import errno
import mmap
import resource
import warnings
import weakref
from collections.abc import Sequence
from os import PathLike, fsdecode
from types import TracebackType
from typing import Any, NoReturn, Self

from .backend import Backend, EngineConfig, start
from .core import Core
from .errors import (
    AsyncIOError,
    BufferedIOWarning,
    ClosedIOError,
    PreallocationWarning,
    RegistrationWarning,
    errno_name,
)
from .files import File
from .handle import Handle
from .opening import Opened, open_file
from .request import Operation, Priority, Read, Write
from .stats import IOStats, device_stats

PAGE = max(4096, mmap.PAGESIZE)
BOUNCE_UNIT = 64 << 10
MAX_BLOCK_BYTES = 1 << 30
MAX_QUEUE_DEPTH = 4096
MAX_THREADS = 1024
DEFAULT_THREADS = 8
DEFAULT_INLINE_BYTES = 64 << 10
BOUNCE_BYTES = 16 << 20
INFLIGHT_BYTES = 8 << 20
BOUNCE_BLOCK_BYTES = 512 << 10


class AsyncIO:
    """A queue of file requests and the engine that works it off, with no Python thread needed for progress.

    Safe to use from several threads. Order: requests run side by side; whoever needs one after the other waits for the
    handle. Only fsync() is ordered: it comes after every write to its file that was submitted before it.

    backend: "uring", "threads", or "auto" for uring with a fall-back (`backend` and `backend_reason` tell).
    block_bytes: requests are split into pieces of at most this size; a multiple of the page size.
    queue_depth: pieces in flight at most.
    max_inflight_bytes: limit for each device (default: 8 MiB or two blocks, whichever is more). A request that comes late
        waits for what is in flight: more keeps no disk busier that answers in a millisecond, and only delays urgent reads.
    num_threads: workers of the threads backend at most, or threads that copy for unaligned requests under uring.
    inline_bytes: a thread that waits for a lone request of at most this size carries it out itself if it has not started.
    bounce_bytes: memory, taken when first used, for requests that are not aligned.
    registered: use registered buffers and files where the kernel grants them.
    """

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        block_bytes: int = 1 << 20,
        queue_depth: int = 32,
        max_inflight_bytes: int | None = None,
        num_threads: int = DEFAULT_THREADS,
        inline_bytes: int = DEFAULT_INLINE_BYTES,
        bounce_bytes: int = BOUNCE_BYTES,
        registered: bool = True,
    ) -> None:
        _check("block_bytes", block_bytes, PAGE, MAX_BLOCK_BYTES)
        if block_bytes % PAGE:
            raise ValueError(f"block_bytes must be a multiple of {PAGE}, not {block_bytes}")
        _check("queue_depth", queue_depth, 1, MAX_QUEUE_DEPTH)
        _check("num_threads", num_threads, 1, MAX_THREADS)
        _check("inline_bytes", inline_bytes, 0, 1 << 30)
        limit = max(INFLIGHT_BYTES, 2 * block_bytes) if max_inflight_bytes is None else max_inflight_bytes
        _check("max_inflight_bytes", limit, 1, 1 << 62)
        _check("bounce_bytes", bounce_bytes, PAGE, 1 << 40)
        # Small enough for several copies at once, large enough for bounce_bytes to be in use at the chosen depth.
        share = bounce_bytes // queue_depth // BOUNCE_UNIT * BOUNCE_UNIT
        bounce_block = min(block_bytes, max(BOUNCE_BLOCK_BYTES, share))
        self.config = EngineConfig(
            queue_depth=queue_depth,
            num_threads=num_threads,
            inline_bytes=inline_bytes,
            bounce_blocks=max(2, min(queue_depth, bounce_bytes // bounce_block)),
            bounce_block_bytes=bounce_block,
            use_fixed=registered,
            block_bytes=block_bytes,
            max_inflight_bytes=limit,
        )
        started = start(backend, self.config)
        self._core = Core(started.native, started.pointer)
        self.backend = started.native.name
        self.backend_reason = started.reason
        self._warned: set[str] = set()
        self._finalizer = weakref.finalize(self, self._core.close, False)

    def open(
        self,
        path: str | PathLike[str],
        *,
        writable: bool = False,
        create: bool = False,
        exclusive: bool = False,
        size: int | None = None,
        sparse: bool = False,
        direct: bool | None = None,
    ) -> File:
        """Opens a regular file or block device.

        create: makes the file when it is missing, readable by its owner only, and never through a symbolic link; implies
        writable. exclusive: it must be missing. size: the file gets exactly this many bytes, with their disk space reserved
        now (ENOSPC comes here, not at some later write) unless `sparse`; what is in the file stays. direct: True insists on
        O_DIRECT, None falls back on buffered I/O with a BufferedIOWarning (once), False is buffered.
        Raises AsyncIOError with errno and path.
        """
        self._core.check()
        if size is not None and size < 0:
            raise ValueError(f"size must be at least 0, not {size}")
        if size is not None and not (writable or create):
            raise ValueError("size needs writable=True or create=True")
        name = fsdecode(path)
        opened = open_file(
            name,
            writable=writable,
            create=create,
            exclusive=exclusive,
            size=size,
            sparse=sparse,
            direct=direct,
        )
        number = self._add(opened, name)
        if direct is None and not opened.direct:
            self._warn_once(BufferedIOWarning, f"{name} is read and written through the page cache: {opened.reason}")
        if opened.preallocation_note and not sparse:
            self._warn_once(PreallocationWarning, f"no disk space is reserved for {name}: {opened.preallocation_note}")
        return File(self._core, name, opened, number, writable or create)

    def _add(self, opened: Opened, path: str) -> int:
        spec = self._core.ffi.new("struct lamina_file_spec *")
        spec.fd = opened.fd
        spec.buffered_fd = opened.buffered_fd
        spec.direct = opened.direct
        spec.offset_align = opened.offset_align
        spec.memory_align = opened.memory_align
        spec.device = opened.device
        number = int(self._core.lib.lamina_file_add(self._core.pointer, spec))
        if number < 0:
            opened.close()
            hint = ""
            if number == -errno.EINVAL:
                hint = (
                    f"; block_bytes {self.config.block_bytes} must be a multiple of the alignment {opened.offset_align}"
                )
            raise AsyncIOError(-number, f"cannot take {path} in: {errno_name(-number)}{hint}", path=path)
        return number

    def _warn_once(self, category: type[Warning], message: str) -> None:
        if category.__name__ not in self._warned:
            self._warned.add(category.__name__)
            warnings.warn(message, category, stacklevel=3)

    def read(self, file: File, buffer: Any, offset: int = 0, *, priority: Priority = Priority.DEMAND) -> Handle:
        """Fills all of `buffer` (any writable contiguous buffer) from `offset`; ShortIOError if the file ends first."""
        return self._one(self._core.lib.lamina_submit_one, Operation.READ, file, buffer, offset, priority)

    def write(self, file: File, buffer: Any, offset: int = 0, *, priority: Priority = Priority.WRITE_BACK) -> Handle:
        """Writes all of `buffer` (any contiguous buffer; leave it alone until done) at `offset`."""
        return self._one(self._core.lib.lamina_submit_one, Operation.WRITE, file, buffer, offset, priority)

    def read_now(self, file: File, buffer: Any, offset: int = 0) -> int:
        """``read(…).wait()`` for somebody who has nothing else to do: a small request (inline_bytes) is carried out by the
        calling thread, which spares it two changes of thread. Returns the bytes read."""
        call = self._core.lib.lamina_perform
        return self._one(call, Operation.READ, file, buffer, offset, Priority.DEMAND).wait()

    def write_now(self, file: File, buffer: Any, offset: int = 0) -> int:
        """``write(…).wait()``, as read_now()."""
        call = self._core.lib.lamina_perform
        return self._one(call, Operation.WRITE, file, buffer, offset, Priority.DEMAND).wait()

    def fsync(self, file: File, *, data_only: bool = True) -> Handle:
        """Makes durable what was submitted for the file before; data_only leaves out times and the like (fdatasync)."""
        core = self._own(file)
        operation = Operation.FDATASYNC if data_only else Operation.FSYNC
        transfer = core.lib.lamina_submit_one(
            core.pointer, file.number, operation, core.ffi.NULL, 0, 0, Priority.DEMAND
        )
        if not transfer:
            self._refuse(file.path)
        return Handle(core, transfer, ((file.path, operation, 0, 0),), file, 0)

    def _own(self, file: File) -> Core:
        core = self._core
        core.check()
        if file.core is not core:
            raise ValueError(f"{file.path} was opened by another AsyncIO")
        return core

    def _memory(self, operation: int, file: File, buffer: Any, offset: int) -> Any:
        if offset < 0:
            raise ValueError(f"offset must be at least 0, not {offset}")
        if operation == Operation.READ:
            return self._core.ffi.from_buffer("char[]", buffer, True)
        if not file.writable:
            raise AsyncIOError(
                errno.EBADF, f"{file.path} is open for reading only: open it with writable=True", path=file.path
            )
        return self._core.ffi.from_buffer("char[]", buffer)

    def _one(self, call: Any, operation: int, file: File, buffer: Any, offset: int, priority: int) -> Handle:
        core = self._own(file)
        memory = self._memory(operation, file, buffer, offset)
        nbytes = len(memory)
        transfer = call(core.pointer, file.number, operation, memory, nbytes, offset, priority)
        if not transfer:
            self._refuse(file.path)
        return Handle(core, transfer, ((file.path, operation, offset, nbytes),), (file, memory), nbytes)

    def submit(self, requests: Sequence[Read | Write], *, priority: Priority = Priority.DEMAND) -> Handle:
        """Submits many requests, of several files if need be, as one transfer.

        The first failure drops those that have not started; the handle tells the failed one that comes first in `requests`.
        """
        self._core.check()
        extents = self._core.ffi.new("struct lamina_extent[]", len(requests))
        told, owned, total = [], [], 0
        for extent, request in zip(extents, requests, strict=True):
            operation = Operation.READ if isinstance(request, Read) else Operation.WRITE
            self._own(request.file)
            memory = self._memory(operation, request.file, request.buffer, request.offset)
            extent.file, extent.operation = request.file.number, operation
            extent.address, extent.nbytes, extent.offset = memory, len(memory), request.offset
            owned.append((request.file, memory))
            told.append((request.file.path, operation, request.offset, len(memory)))
            total += len(memory)
        transfer = self._core.lib.lamina_submit(self._core.pointer, extents, len(requests), priority)
        if not transfer:
            self._refuse(told[0][0] if told else "")
        return Handle(self._core, transfer, tuple(told), owned, total)

    def _refuse(self, path: str) -> NoReturn:
        """Raises for the submission that has just failed."""
        number = int(self._core.ffi.errno)
        if number in (errno.ESHUTDOWN, errno.EBADF):
            raise ClosedIOError(errno.EBADF, f"{path or 'this AsyncIO'} is closed", path=path or None)
        raise AsyncIOError(number, f"cannot submit a request for {path}: {errno_name(number)}", path=path)

    def register(self, buffer: Any) -> bool:
        """Registers memory with the kernel, which makes transfers of it cheaper; it is kept alive until unregister()
        or close(). False (with one RegistrationWarning if the kernel refused) when that cannot be had: transfers work
        all the same.
        """
        core = self._core
        core.check()
        memory = core.ffi.from_buffer("char[]", buffer, True)
        address = int(core.ffi.cast("uintptr_t", memory))
        if not self.config.use_fixed or address in core.registered or not len(memory):
            return address in core.registered
        rc = -core.lib.lamina_engine_register(core.pointer, memory, len(memory))
        if rc == 0:
            core.registered[address] = memory
        elif rc != errno.ENOTSUP:
            self._warn_once(RegistrationWarning, _registration_advice(rc, len(memory)))
        return bool(rc == 0)

    def unregister(self, buffer: Any) -> None:
        """Undoes register(); memory that is not registered is left alone."""
        core = self._core
        core.check()
        address = int(core.ffi.cast("uintptr_t", core.ffi.from_buffer("char[]", buffer)))
        memory = core.registered.get(address)
        if memory is not None:
            core.lib.lamina_engine_unregister(core.pointer, memory, len(memory))
            del core.registered[address]

    def drain(self) -> None:
        """Waits until everything that was submitted is done. Failures are left for their handles' wait()."""
        self._core.check()
        for handle in self._core.live():
            while not handle.done():
                self._core.lib.lamina_transfer_wait(handle._transfer, -1)

    def stats(self) -> IOStats:
        """Counters so far; still there after close()."""
        core = self._core
        count = 8
        while True:
            entries = core.ffi.new("struct lamina_device_stats[]", count)
            found = core.lib.lamina_stats(core.pointer, entries, count)
            if found <= count:
                devices = tuple(device_stats(entries[i]) for i in range(found))
                return IOStats(backend=self.backend, devices=devices)
            count = found

    def features(self) -> dict[str, int]:
        """What the driver found at run time; see csrc/engine.h, struct lamina_features."""
        core = self._core
        found = core.ffi.new("struct lamina_features *")
        core.lib.lamina_engine_features(core.pointer, found)
        names = [name for name, _ in core.ffi.typeof("struct lamina_features").fields]
        return {name: int(getattr(found, name)) for name in names}

    def close(self, *, cancel: bool = False) -> None:
        """Ends everything: waits for what was submitted, or drops what has not started (cancel). Idempotent."""
        self._core.close(cancel)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def __repr__(self) -> str:
        return f"AsyncIO(backend={self.backend!r}{', closed' if self._core.closed else ''})"


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")


def _registration_advice(number: int, nbytes: int) -> str:
    what = f"{nbytes} bytes could not be registered with io_uring: {errno_name(number)}. "
    if number == errno.EINVAL:
        return what + "The kernel has no such table (5.19 has). Transfers go on unregistered, at more CPU time"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = ["unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes" for limit in (soft, hard)]
    return what + (
        f"RLIMIT_MEMLOCK is {words[0]} (hard limit {words[1]}) and must cover all registered memory: raise it "
        "(`ulimit -l unlimited`, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in Docker) or grant CAP_IPC_LOCK. "
        "Transfers go on unregistered, at more CPU time"
    )

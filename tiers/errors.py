"""What can go wrong in the storage half of the tiers, one class per thing a caller may want to catch."""


class BudgetError(MemoryError):
    """A request does not fit its byte budget; nothing was allocated."""

    def __init__(self, message: str, *, owner: str, wanted: int, free: int, budget: int, largest: int) -> None:
        super().__init__(message)
        self.owner = owner
        self.wanted = wanted
        self.free = free
        self.budget = budget
        self.largest = largest


class StoreError(RuntimeError):
    """The generation store cannot do what was asked; the last committed generation is intact unless said
    otherwise."""

    def add_hint(self, hint: str) -> None:
        """Say what else can be done."""
        self.args = (f"{self.args[0]}, {hint}",)


class LockedError(StoreError):
    """Another job owns the folder."""

    def __init__(self, message: str, *, pid: int | None, host: str | None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class LayoutError(StoreError):
    """What is on disk has other shards, planes or sizes than what was asked for."""


class SpaceError(StoreError):
    """The disks do not have room for what was asked; nothing was changed."""

    def __init__(self, message: str, *, wanted: int, free: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.free = free


class StorageFault(StoreError):
    """A disk failed and no other path could take over; the last committed generation is intact, unless it was being written over.

    errno and path: of the failing transfer. torn: it was being written over.
    """

    def __init__(self, message: str, *, errno: int | None, path: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn
        self.errno = errno
        self.path = path


def fault(error: OSError, what: str, *, torn: bool = False) -> StorageFault:
    """The error for a disk that failed with nothing to take over. ``torn``: the last committed generation was being written over
    (generations: 1)."""
    mend = "free space or give another path in tiers.nvme"
    left = f"The last committed generation is intact: {mend}"
    if torn:
        left = f"The only generation (generations: 1) was being written over and is lost: {mend}, and load a checkpoint"
    return StorageFault(
        f"{what} failed: {error}. {left}",
        errno=error.errno,
        path=str(getattr(error, "path", None) or error.filename or ""),
        torn=torn,
    )


class IntegrityError(StoreError):
    """Bytes on disk are not the bytes that were written.

    path: file. offset: byte in it. chunk: number within the plane. expected, found: CRC32C (or sizes for a file
    of the wrong length).
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        offset: int = 0,
        chunk: int = -1,
        expected: int = 0,
        found: int = 0,
        shard: str = "",
        plane: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.chunk = chunk
        self.expected = expected
        self.found = found
        self.shard = shard
        self.plane = plane

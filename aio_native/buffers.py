"""Memory that the device can reach fast: aligned to huge pages and, where the kernel gives them, made of them."""

import contextlib
import mmap
from types import TracebackType
from typing import Any, Self

from .native import load_threads

HUGE_PAGE = 2 << 20
MAP_HUGETLB = 0x40000  # absent from the mmap module before Python 3.13
MAP_HUGE_2MB = 21 << 26


class Reservation(mmap.mmap):
    """The mapping behind AlignedBuffers. A subclass so that ``memoryview.obj`` tells where memory comes from."""


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _map_hugetlb(nbytes: int) -> Reservation | None:
    """None when the administrator has set aside too few huge pages (vm.nr_hugepages)."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB
    try:
        return Reservation(-1, _round_up(nbytes, HUGE_PAGE), flags=flags)
    except OSError:
        return None


class AlignedBuffer:
    """`nbytes` of zeroed, writable memory that begins on a 2 MiB boundary.

    huge_pages: None takes hugetlb pages when there are free ones, else asks for transparent huge pages when the buffer
    is at least one huge page long; False takes small pages; True is like None but raises OSError(ENOMEM) when the first
    page does not turn out huge. What was had is in `page_kind`.

    `view` keeps the memory alive: after close() it goes back to the system when the last view built on it dies, so
    neither a transfer in flight nor an array made of a view is ever left hanging.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool | None = None) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        self.nbytes = nbytes
        wish = huge_pages is not False and (huge_pages is True or nbytes >= HUGE_PAGE)
        mapping = _map_hugetlb(nbytes) if wish else None
        self._hugetlb = mapping is not None
        # A page of address space in front lets the buffer begin on a boundary; untouched, it takes no memory.
        self._mapping = mapping or Reservation(
            -1, _round_up(nbytes, mmap.PAGESIZE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        base = _address_of(self._mapping)
        skip = -base % HUGE_PAGE
        self.address = base + skip
        self.view = memoryview(self._mapping)[skip : skip + nbytes]
        if wish and not self._hugetlb:
            # Kernels without transparent huge pages refuse; page_kind then says "small".
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE, skip, _round_up(nbytes, mmap.PAGESIZE))
            self.view[0] = 0  # has the kernel show which kind of page it gives
        if huge_pages and self.page_kind == "small":
            self.close()
            raise OSError(
                12,
                f"no huge page for a buffer of {nbytes} bytes: set /sys/kernel/mm/transparent_hugepage/enabled to madvise, "
                "or reserve pages with vm.nr_hugepages",
            )

    @property
    def page_kind(self) -> str:
        """ "hugetlb", "thp" or "small": what most of the resident memory consists of, by the kernel's own account."""
        if self._hugetlb:
            return "hugetlb"
        resident, huge = resident_bytes(self.address, self.nbytes)
        return "thp" if huge * 2 > resident else "small"

    def close(self) -> None:
        """Lets go of the memory; idempotent. Views that are still held keep it alive."""
        with contextlib.suppress(BufferError):  # a transfer uses the view itself
            self.view.release()
        with contextlib.suppress(BufferError):  # other views are alive: the last of them unmaps
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AlignedBuffer({self.nbytes} bytes at {self.address:#x})"


def _address_of(mapping: Any) -> int:
    ffi = load_threads().ffi
    return int(ffi.cast("uintptr_t", ffi.from_buffer(mapping)))


def resident_bytes(address: int, nbytes: int) -> tuple[int, int]:
    """(bytes resident, of those in huge pages) of the mappings that overlap the range, from /proc/self/smaps."""
    resident = huge = 0
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                low, _, high = name.partition("-")
                inside = int(low, 16) < address + nbytes and address < int(high, 16)
            elif inside and name == "Rss:":
                resident += int(rest.split()[0]) << 10
            elif inside and name in ("AnonHugePages:", "Private_Hugetlb:", "Shared_Hugetlb:"):
                huge += int(rest.split()[0]) << 10
    return resident, huge

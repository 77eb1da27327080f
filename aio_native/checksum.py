"""CRC-32C (Castagnoli) with the CPU's own instructions."""

from typing import Any

from .native import load_threads


def crc32c(buffer: Any, value: int = 0) -> int:
    """Checksum of any contiguous buffer; `value` continues an earlier one. The GIL is released meanwhile.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    native = load_threads()
    if not 0 <= value < 1 << 32:
        raise ValueError(f"value must be an unsigned 32-bit checksum, not {value}")
    memory = native.ffi.from_buffer(buffer)
    return int(native.lib.lamina_crc32c(value, memory, len(memory)))


def crc32c_join(value: int, sums: Any, piece_nbytes: int, last_nbytes: int) -> int:
    """Continues `value` over pieces that are not looked at, from the checksum of each (a buffer of uint32).

    All pieces are piece_nbytes long but the last, which is last_nbytes long.
    """
    native = load_threads()
    crcs = native.ffi.from_buffer("uint32_t[]", sums)
    return int(native.lib.lamina_crc32c_join(value, crcs, len(crcs), piece_nbytes, last_nbytes))


def crc32c_path() -> str:
    """The code path of this CPU: ``sse4.2+pclmul``, ``armv8-crc`` or ``table``."""
    native = load_threads()
    return str(native.ffi.string(native.lib.lamina_crc32c_path()).decode())

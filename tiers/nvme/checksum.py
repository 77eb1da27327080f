"""CRC32C arithmetic: joining the checksums of neighbouring pieces without reading them again. Pure."""

from functools import lru_cache

_POLY = 0x82F63B78  # Castagnoli, bit-reversed: bit 31 is x^0


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial, both bit-reversed."""
    product = 0
    bit = 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    power, square = 1 << 31, 1 << 23  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        nbytes >>= 1
    return power


def combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC32C of two pieces in a row, from the CRC32C of each and the length of the second."""
    return _multiply(_shift(second_nbytes), first) ^ second

"""Quantities as people write them: ``256GB``, ``24GiB``, ``5e8``, ``2.7GB/s``."""

import math
import re

from lamina.engine.planner.errors import PlanError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1,
    "b": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate(("k", "m", "g", "t", "p"), start=1)},
    **{unit + "b": 10 ** (3 * power) for power, unit in enumerate(("k", "m", "g", "t", "p"), start=1)},
    **{unit + "ib": 2 ** (10 * power) for power, unit in enumerate(("k", "m", "g", "t", "p"), start=1)},
}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_number(value: str | float | int, *, what: str, per_second: bool = False) -> float:
    """A number >= 0 with an optional unit: GB is 10^9, GiB is 2^30; ``per_second`` also takes a ``/s``
    suffix.

    Raises PlanError that names ``what`` when the value is no such number.
    """
    if isinstance(value, bool):
        raise PlanError(f"{what}: {value!r} is not a number; write for example 24GiB or 5e8")
    if isinstance(value, int | float):
        number = float(value)
    else:
        text = value[:-2] if per_second and value.endswith("/s") else value
        match = _PATTERN.fullmatch(text)
        if match is None or match.group(2).lower() not in _FACTORS:
            raise PlanError(
                f"{what}: {value!r} is not a number with a known unit (kB MB GB TB are powers of 1000, "
                "KiB MiB GiB TiB powers of 1024); write for example 24GiB or 5e8"
            )
        number = float(match.group(1)) * _FACTORS[match.group(2).lower()]
    if not math.isfinite(number) or number < 0:
        raise PlanError(f"{what}: {value!r} must be finite and not negative")
    return number


def parse_bytes(value: str | float | int, *, what: str) -> int:
    """Bytes as an int, fractions cut off. Raises PlanError that names ``what``."""
    return int(parse_number(value, what=what))


def format_bytes(nbytes: float) -> str:
    """Decimal units with three significant digits: ``31.2 GB``."""
    for factor, unit in ((10**15, "PB"), (TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB")):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.3g} {unit}" if abs(nbytes) < 999.5 * factor else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"


def format_count(number: float) -> str:
    """``1.5 B``-style counts without the space: ``124M``, ``6.74B``, ``1.01T``."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}" if abs(number) < 999.5 * factor else f"{number / factor:.0f}{unit}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """``420 us``, ``1.92 s``, ``3.1 h``: whichever unit keeps the figure short."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 3600:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds / 3600:.3g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} days"

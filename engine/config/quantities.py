"""Whole numbers as people write them: 5e8, "5e8", "2GB", "512MiB".

Decimal units are powers of 1000 (GB = 10^9 bytes), binary units powers of 1024 (GiB = 2^30 bytes).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

Kind = Literal["count", "bytes"]

_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 2**63 - 1
_PREFIXES = "kMGTP"
BYTE_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix.lower()}b": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix.lower()}ib": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
}


def parse_quantity(value: object, kind: Kind) -> int:
    """A whole number from an int, an integral float or a string; byte quantities may carry a unit.

    Raises ValueError saying what is wrong and what to write; the bounds of a field are checked elsewhere.
    """
    if isinstance(value, bool):
        raise ValueError(f"want {_wanted(kind)}, got {str(value).lower()} (a truth value)")
    if isinstance(value, int | float):
        exact = Decimal(value)
    elif isinstance(value, str):
        exact = _from_text(value, kind)
    else:
        raise ValueError(f"want {_wanted(kind)}, got {value!r} ({type(value).__name__})")
    if not exact.is_finite():
        raise ValueError(f"want {_wanted(kind)}, got {value!r}")
    # Compared before conversion: int() of 1e300 would be exact, long and useless.
    if abs(exact) > _LARGEST:
        raise ValueError(f"want {_wanted(kind)} of at most 2^63 - 1, got {value!r}")
    if exact != exact.to_integral_value():
        raise ValueError(f"want {_wanted(kind)}, got {value!r}, which is {exact.normalize()} and not whole")
    return int(exact)


def _from_text(text: str, kind: Kind) -> Decimal:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"want {_wanted(kind)}, got {text!r}")
    number, unit = match.groups()
    if not unit:
        return Decimal(number)
    if kind == "count":
        raise ValueError(f"is a number without a unit, got {text!r}: write it as 5e8 or 500000000")
    factor = BYTE_UNITS.get(unit.lower())
    if factor is None:
        if unit.upper() in _PREFIXES.upper():
            prefix = _PREFIXES[_PREFIXES.upper().index(unit.upper())]
            raise ValueError(f"got {text!r}, which is ambiguous: write {number}{prefix}B or {number}{prefix.upper()}iB")
        raise ValueError(f"got {text!r}, whose unit {unit!r} is unknown: use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    return Decimal(number) * factor


def _wanted(kind: Kind) -> str:
    if kind == "bytes":
        return 'a whole number of bytes (such as 2000000000, 2e9, "2GB" or "2GiB")'
    return 'a whole number (such as 500000000, 5e8 or "5e8")'


def _count(value: Any) -> int:
    return parse_quantity(value, "count")


def _bytes(value: Any) -> int:
    return parse_quantity(value, "bytes")


_COUNT_SCHEMA = {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "string"}]}

Count = Annotated[int, BeforeValidator(_count), WithJsonSchema(_COUNT_SCHEMA), Field(ge=0)]
"""A number of things >= 0."""
PositiveCount = Annotated[int, BeforeValidator(_count), WithJsonSchema(_COUNT_SCHEMA), Field(ge=1)]
"""A number of things >= 1."""
Bytes = Annotated[int, BeforeValidator(_bytes), WithJsonSchema(_COUNT_SCHEMA), Field(ge=1)]
"""A number of bytes >= 1, as a number or with a unit."""


def format_bytes(nbytes: int) -> str:
    """`2000000000` -> `2 GB`, `1073741824` -> `1 GiB`, with the largest unit that divides exactly."""
    for power in range(len(_PREFIXES), 0, -1):
        for base, suffix in ((1024, "iB"), (1000, "B")):
            factor = base**power
            if nbytes and nbytes % factor == 0:
                prefix = _PREFIXES[power - 1]
                return f"{nbytes // factor} {prefix.upper() if suffix == 'iB' else prefix}{suffix}"
    return f"{nbytes} B"

"""The effective config in print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def describe(effective: Mapping[str, Any], origins: Mapping[str, str], hints: Sequence[str], world_size: int) -> str:
    """One line a key: path, value, origin (given, derived, auto…, else default); then the warnings."""
    rows = [("world size", str(world_size), "argument")]
    rows += [(path, _shown(value), _origin(path, origins)) for path, value in _leaves(effective)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 40)
    lines = ["effective config"]
    lines += [f"  {path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in rows]
    if hints:
        lines.append("warnings")
        lines += [f"  {hint}" for hint in hints]
    return "\n".join(lines)


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """That of the key, or of the innermost block around it that has one."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, "default")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, str) else str(value)

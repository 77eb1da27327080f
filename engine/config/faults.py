"""Pydantic's errors in our words: path, wanted, got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_WANTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "literal_error": "one of {expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "dict_type": "a block {{...}}",
    "model_type": "a block {{...}}",
    "model_attributes_type": "a block {{...}}",
    "tuple_type": "a list",
    "list_type": "a list",
    "missing": "a value",
}


def faults(error: ValidationError, data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, list[str | int], str]]:
    """Each faulty place once: (`prefix` + dotted path, path into `data`, message)."""
    wants: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        wants.setdefault(_real_path(detail["loc"], data, detail["type"]), []).append(detail)
    return [(prefix + dotted(place), list(place), _message(details)) for place, details in wants.items()]


def dotted(place: tuple[str | int, ...]) -> str:
    """`("tiers", "nvme", 0, "path")` -> `tiers.nvme[0].path`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """A value as the file has it, with its type, shortened."""
    names = {bool: "a truth value", int: "a whole number", float: "a number", str: "a string", list: "a list"}
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    if len(text) > 60:
        text = text[:57] + "..."
    if value is None:
        return text
    return f"{text} ({names.get(type(value), 'a block' if isinstance(value, dict) else type(value).__name__)})"


def _real_path(loc: tuple[str | int, ...], data: Any, kind: str) -> tuple[str | int, ...]:
    """`loc` without the names of union members that pydantic puts in: only steps that `data` has."""
    place: list[str | int] = []
    for part in loc:
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif kind == "missing" and isinstance(data, Mapping) and part is loc[-1]:
            pass
        else:
            continue
        place.append(part)
    return tuple(place)


def _message(details: list[ErrorDetails]) -> str:
    texts: list[str] = []
    for detail in details:
        if detail["type"] == "value_error":
            return str(detail["ctx"]["error"])
        if detail["type"] == "missing":
            return "is required here and not given"
        if detail["type"] == "extra_forbidden":
            return "is not a known key here"
        wanted = _WANTED.get(detail["type"])
        text = wanted.format(**detail.get("ctx", {})) if wanted else detail["msg"]
        if text not in texts:
            texts.append(text)
    return f"want {' or '.join(texts)}, got {shown(details[0]['input'])}"

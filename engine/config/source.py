"""Where a config comes from: a JSON file or a mapping, as plain dicts, lists and scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from lamina.engine.config.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any]


class _Repeated(ValueError):
    """A key that one JSON object has twice."""


def read_source(source: Source) -> tuple[dict[str, Any], str]:
    """The config as a dict of its own (never the caller's) and the words by which errors name it.

    Raises ConfigError for a file that cannot be read or is not JSON (with line and column), a key given
    twice, and values that JSON does not have.
    """
    if isinstance(source, Mapping):
        return _plain_mapping(source), "the config"
    if not isinstance(source, str | os.PathLike):
        raise ConfigError([("", f"want a path or a mapping, got {type(source).__name__}")])
    path = os.path.abspath(os.path.expanduser(os.fspath(source)))
    name = f"config {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError([("", f"cannot be read: {error.strerror}")], source=name) from error
    except UnicodeDecodeError as error:
        raise ConfigError([("", f"is not UTF-8 text (byte {error.start})")], source=name) from error
    return parse_text(text, name), name


def parse_text(text: str, name: str = "the config") -> dict[str, Any]:
    """The JSON object in `text`. Raises ConfigError, with line and column where JSON is broken."""
    repeated: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and key not in repeated:
                    repeated.append(key)
                seen.add(key)
        return built

    def refuse_constant(word: str) -> Any:
        raise _Repeated(f"holds {word}, which JSON does not have: write a number")

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1].strip()
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            [("", f"is not JSON at {where}: {error.msg}; the line reads {line!r}")], source=name
        ) from error
    except _Repeated as error:
        raise ConfigError([("", str(error))], source=name) from error
    if repeated:
        raise ConfigError([(key, "is given twice in one object: keep one") for key in repeated], source=name)
    if not isinstance(value, dict):
        raise ConfigError([("", f"want a JSON object {{...}}, got {type(value).__name__}")], source=name)
    return value


def _plain_mapping(source: Mapping[str, Any]) -> dict[str, Any]:
    problems: list[tuple[str, str]] = []

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            built = {}
            for key, inner in value.items():
                if isinstance(key, str):
                    built[key] = plain(inner, f"{path}.{key}" if path else key)
                else:
                    problems.append((path, f"has the key {key!r} ({type(key).__name__}): keys are strings"))
            return built
        if isinstance(value, list | tuple):
            return [plain(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return value

    result = plain(source, "")
    if problems:
        raise ConfigError(problems)
    assert isinstance(result, dict)  # a mapping always becomes a dict
    return result

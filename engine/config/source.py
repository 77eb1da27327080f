"""Where a config comes from: a JSON file or a mapping, as plain dicts, lists and scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.engine.config.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What a source holds, and the faults that do not keep it from being read further."""

    given: dict[str, Any]
    name: str
    """The words by which errors name the source."""
    problems: list[tuple[str, str]]


def read_source(source: Source) -> tuple[dict[str, Any], str]:
    """The config as a dict of its own (never the caller's) and its name. Raises ConfigError for any fault."""
    scanned = scan_source(source)
    if scanned.problems:
        raise ConfigError(scanned.problems, source=scanned.name)
    return scanned.given, scanned.name


def scan_source(source: Source) -> Scanned:
    """The config as a dict of its own; keys given twice and keys that are no strings are noted as problems.

    Raises ConfigError for a file that cannot be read or is not JSON (with line and column).
    """
    if isinstance(source, Mapping):
        return _scan_mapping(source)
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
    return scan_text(text, name)


def scan_text(text: str, name: str = "the config") -> Scanned:
    """The JSON object in `text`. Raises ConfigError, with line and column where JSON is broken."""
    # Objects with a key given twice, each with those keys. They are kept here so that no id is used anew.
    repeating: list[tuple[dict[str, Any], list[str]]] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            keys = [key for key, _ in pairs]
            repeating.append((built, [key for key in built if keys.count(key) > 1]))
        return built

    try:
        value = json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1].strip()
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            [("", f"is not JSON at {where}: {error.msg}; the line reads {line[:80]!r}")], source=name
        ) from error
    except RecursionError as error:
        raise ConfigError([("", "is nested too deeply to be a config")], source=name) from error
    if not isinstance(value, dict):
        raise ConfigError([("", f"want a JSON object {{...}}, got {type(value).__name__}")], source=name)
    problems = [
        (f"{path}.{key}" if path else key, "is given twice in one object: keep one")
        for path, inner in _objects(value, "")
        for built, keys in repeating
        if built is inner
        for key in keys
    ]
    return Scanned(given=value, name=name, problems=problems)


def _objects(value: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every dict in `value` with its dotted path."""
    found: list[tuple[str, dict[str, Any]]] = []
    if isinstance(value, dict):
        found.append((path, value))
        for key, inner in value.items():
            found += _objects(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _objects(inner, f"{path}[{index}]")
    return found


def _scan_mapping(source: Mapping[str, Any]) -> Scanned:
    problems: list[tuple[str, str]] = []

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return plain_dict(value, path)
        if isinstance(value, list | tuple):
            return [plain(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return value

    def plain_dict(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, inner in value.items():
            if isinstance(key, str):
                built[key] = plain(inner, f"{path}.{key}" if path else key)
            else:
                problems.append((path, f"has the key {key!r} ({type(key).__name__}): keys are strings"))
        return built

    return Scanned(given=plain_dict(source, ""), name="the config", problems=problems)

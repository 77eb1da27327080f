"""What the parser raises: every problem of a config at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One fault of a config. `path` is dotted, or "" when it concerns the whole file."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A config that cannot be used. `problems` holds every fault found, in the order of the file."""

    def __init__(self, problems: Iterable[tuple[str, str]], *, source: str = "the config") -> None:
        self.problems: list[Problem] = [Problem(path, message) for path, message in problems]
        self.source = source
        count = len(self.problems)
        head = f"{source} has {count} problem{'' if count == 1 else 's'}:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def in_file_order(problems: Iterable[tuple[str, str]], given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Problems sorted as their keys stand in the file; those of keys that are not in it come last."""
    order: dict[str, int] = {}

    def number(value: Any, path: str) -> None:
        order.setdefault(path, len(order))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                number(inner, f"{path}.{key}" if path else str(key))

    number(given, "")

    def place(problem: tuple[str, str]) -> int:
        path = problem[0].partition("[")[0]
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order[path] if path else len(order)

    return sorted(problems, key=place)

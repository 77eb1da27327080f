"""One row of the table of known keys."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """What becomes of a key of the dialect."""

    IMPLEMENTED = "implemented"
    HINT = "hint"
    REFUSED = "refused"
    RENAMED = "renamed"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A known key. `path` is dotted; a key that is a block has rows of its own for what it contains.

    `neutral` are values under which a refused key asks for nothing; `instead` says what to write;
    `types` are the JSON types a key may have that no model checks (empty: any).
    """

    path: str
    status: Status
    reason: str = ""
    instead: str = ""
    neutral: tuple[Any, ...] = ()
    types: tuple[type, ...] = field(default=())
    is_block: bool = False

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.status}"]
        if self.reason:
            parts.append(self.reason)
        if self.instead:
            parts.append(f"write {self.instead}" if self.status is not Status.RENAMED else f"now {self.instead}")
        return "; ".join(parts)

    def is_neutral(self, value: Any) -> bool:
        """Whether `value` asks for nothing. 0 and False are told apart."""
        return any(type(value) is type(wanted) and value == wanted for wanted in self.neutral) or (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and any(
                isinstance(wanted, int | float) and not isinstance(wanted, bool) and value == wanted
                for wanted in self.neutral
            )
        )

"""The base of every block of the config and how a field says what it does."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Block(BaseModel):
    """A frozen, strict block: no unknown key, no conversion between types, no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def hint(default: Any, reason: str, *, description: str = "") -> Any:
    """A field that is read and checked, but changes nothing here; giving it is listed as a warning."""
    return Field(default=default, description=description or reason, json_schema_extra={"hint": reason})


def own_auto(default: Any, *, description: str) -> Any:
    """A field for which "auto" is a value of its own and not a request to fill one in."""
    return Field(default=default, description=description, json_schema_extra={"own_auto": True})


def _absolute(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"want a path, got {value!r} ({type(value).__name__})")
    if not value.strip() or "\0" in value:
        raise ValueError(f"want a path, got {value!r}")
    return os.path.abspath(os.path.expanduser(value))


AbsolutePath = Annotated[str, BeforeValidator(_absolute)]
"""A path, made absolute once against the working directory of the moment; `~` is expanded."""


def _names(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"want a list of names, got {value!r}")
    return tuple(value)


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""Names, written as a JSON list of strings."""


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"want a list of two numbers, got {value!r}")
    return tuple(value)


Pair = Annotated[tuple[float, float], BeforeValidator(_pair)]
"""Two numbers, written as a JSON list."""

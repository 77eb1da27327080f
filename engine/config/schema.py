"""A JSON schema of the whole dialect, for editors: what is offered, hints, and refused keys marked deprecated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.engine.config.key import Key, Status

_AUTO = {"const": "auto"}


def complete_schema(schema: dict[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """`schema` of the model with what the model does not say: "auto", hints, renamed and refused keys."""
    definitions: dict[str, Any] = schema.get("$defs", {})
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "lamina config"
    for definition in definitions.values():
        _allow_auto(definition)
    _allow_auto(schema)
    for key in keys.values():
        if key.status is Status.IMPLEMENTED:
            continue
        for block in _blocks(schema, definitions, key.path.split(".")[:-1]):
            name = key.path.rpartition(".")[2]
            note = {"description": f"{key.status}: {key.reason or key.instead}"}
            if key.status is not Status.HINT:
                note["deprecated"] = True  # type: ignore[assignment]
            block.setdefault("properties", {}).setdefault(name, note)
    return schema


def _allow_auto(block: dict[str, Any]) -> None:
    """Let every plain key of a block be "auto", and every block in it be {"enabled": false}."""
    for name, value in block.get("properties", {}).items():
        if "$ref" in value:
            off = {"properties": {"enabled": {"const": False}}, "required": ["enabled"], "maxProperties": 1}
            block["properties"][name] = {"anyOf": [value, {"type": "object", **off}]}
        else:
            kept = {key: value.pop(key) for key in ("title", "description", "default") if key in value}
            block["properties"][name] = {"anyOf": [*value.pop("anyOf", ()), *([value] if value else []), _AUTO], **kept}


def _blocks(schema: dict[str, Any], definitions: Mapping[str, Any], path: list[str]) -> list[dict[str, Any]]:
    """The object schemas that stand at `path`: several where types are united, none where the block is free."""
    blocks = [schema]
    for part in path:
        found: list[dict[str, Any]] = []
        for block in blocks:
            inner = block.get("properties", {}).get(part, {})
            for choice in (inner, *inner.get("anyOf", ())):
                reference = choice.get("$ref", "").rpartition("/")[2]
                if reference in definitions:
                    found.append(definitions[reference])
        blocks = found
    return blocks

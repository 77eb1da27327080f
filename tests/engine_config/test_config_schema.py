"""The JSON schema for editors names every key and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

from lamina.engine.config import KEYS, EngineConfig, Status

SCHEMA = json.loads(json.dumps(EngineConfig.json_schema()))


def entries(path: str) -> list[dict[str, Any]]:
    """Every place of the schema that describes the key at `path`."""
    found = [SCHEMA]
    for part in path.split("."):
        blocks: list[dict[str, Any]] = []
        for entry in found:
            for choice in (entry, *entry.get("anyOf", ())):
                name = choice.get("$ref", "").rpartition("/")[2]
                blocks.append(SCHEMA["$defs"][name] if name else choice)
        found = [block["properties"][part] for block in blocks if part in block.get("properties", {})]
    return found


def test_every_key_is_in_the_schema() -> None:
    wrong = []
    for path, key in KEYS.items():
        parent = KEYS.get(path.rpartition(".")[0])
        if parent is not None and parent.status in (Status.REFUSED, Status.HINT):
            continue  # a block of that kind may hold anything in an editor
        old = key.status in (Status.REFUSED, Status.RENAMED)
        if not any(place.get("deprecated", False) is old for place in entries(path)):
            wrong.append(path)
    assert wrong == []
    assert len(KEYS) > 200


def test_plain_keys_may_be_auto_and_blocks_may_be_switched_off() -> None:
    (rate,) = entries("optimizer.params.lr")
    assert {"const": "auto"} in rate["anyOf"]
    assert rate["description"] == "learning rate"
    (aio,) = entries("aio")
    assert any(choice.get("properties") == {"enabled": {"const": False}} for choice in aio["anyOf"])


def test_defaults_in_the_schema_are_the_effective_ones() -> None:
    effective = EngineConfig.load({}).effective()
    for path in (
        "gradient_clipping",
        "aio.queue_depth",
        "zero_optimization.offload_param.buffer_count",
        "tiers.verify",
    ):
        value: Any = effective
        for part in path.split("."):
            value = value[part]
        assert [place["default"] for place in entries(path)] == [value]

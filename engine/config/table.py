"""The table of every known key: what the models hold, and the dialect's other keys."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping

from pydantic.fields import FieldInfo

from lamina.engine.config.block import Block
from lamina.engine.config.dialect import HINTS, REFUSED, RENAMED
from lamina.engine.config.key import Key, Status
from lamina.engine.config.optimizer import AdamConfig
from lamina.engine.config.scheduler import SCHEDULES, SchedulerConfig


def block_of(annotation: object) -> type[Block] | None:
    """The block that a field's annotation names, alone or as `Block | None`; None for every other field."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        blocks = [block for block in map(block_of, typing.get_args(annotation)) if block is not None]
        if SchedulerConfig in blocks:
            return SchedulerConfig
        if AdamConfig in blocks:
            return AdamConfig
        return blocks[0] if len(blocks) == 1 else None
    return None


def extra(field: FieldInfo) -> Mapping[str, object]:
    """What block.hint() and block.own_auto() noted on a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def model_keys(model: type[Block], prefix: str = "") -> Iterator[Key]:
    """Rows for every field of `model` and of the blocks in it."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = block_of(field.annotation)
        hinted = extra(field).get("hint")
        if hinted is not None:
            yield Key(path=path, status=Status.HINT, reason=str(hinted))
        else:
            reason = field.description or (inner.__doc__ or "").strip() if inner else field.description or ""
            yield Key(path=path, status=Status.IMPLEMENTED, reason=reason, is_block=inner is not None)
        if inner is not None:
            yield from model_keys(inner, f"{path}.")
        elif model is SchedulerConfig and name == "params":
            for schedule in SCHEDULES.values():
                yield from model_keys(schedule, f"{path}.")


@functools.cache
def known_keys(model: type[Block]) -> Mapping[str, Key]:
    """Every key of the config by its dotted path."""
    keys = {key.path: key for key in model_keys(model)}
    # Params of a schedule are a union of models: the block itself has no single model.
    keys["scheduler.params"] = Key(
        path="scheduler.params", status=Status.IMPLEMENTED, reason="parameters of the schedule", is_block=True
    )
    for key in (*REFUSED, *HINTS):
        keys.setdefault(key.path, key)
    for old, new in RENAMED.items():
        keys.setdefault(old, Key(path=old, status=Status.RENAMED, instead=new, is_block=keys[new].is_block))
    return types.MappingProxyType(keys)

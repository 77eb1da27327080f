"""What is told about a generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.tiers.nvme.manifest import GenerationRecord


@dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """A committed generation: its number, the training step and what the caller wanted remembered."""

    id: int
    step: int
    meta: Mapping[str, Any]
    durable: bool


def info_of(record: GenerationRecord) -> GenerationInfo:
    return GenerationInfo(id=record.id, step=record.step, meta=dict(record.meta), durable=record.durable)

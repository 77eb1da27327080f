"""The block `tiers`: budgets, paths and placement. This block is lamina's own, not DeepSpeed's."""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from lamina.engine.config.block import AbsolutePath, Block, own_auto
from lamina.engine.config.quantities import Bytes, Count

PlaneName = Literal["param", "remainder", "master", "exp_avg", "exp_avg_sq", "grad"]
TierName = Literal["device", "host", "nvme"]
PLANES: tuple[PlaneName, ...] = ("param", "remainder", "master", "exp_avg", "exp_avg_sq", "grad")
STATE_PLANES: tuple[PlaneName, ...] = ("remainder", "master", "exp_avg", "exp_avg_sq")
Fraction = Annotated[float, Field(ge=0, le=1)]
PlaneChoice = TierName | dict[TierName, Fraction]

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def tier_shares(choice: PlaneChoice) -> dict[TierName, float]:
    """Each tier that holds some of a plane, fastest first, and the part of the elements that it holds."""
    given = choice if isinstance(choice, dict) else {choice: 1.0}
    return {tier: given[tier] for tier in typing.get_args(TierName) if given.get(tier)}


class NvmePathConfig(Block):
    """One folder on a disk."""

    path: AbsolutePath = Field(description="folder; made when it is missing")
    bytes: Bytes | None = Field(default=None, description="the most that may be used there; null: what is free")


_PATH_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "bytes": {"type": ["integer", "number", "string", "null"]}},
            "required": ["path"],
            "additionalProperties": False,
        },
    ]
}
_PATHS_SCHEMA = {"anyOf": [{"type": "array", "items": _PATH_SCHEMA}, *_PATH_SCHEMA["anyOf"]]}


def _paths(value: Any) -> Any:
    """A folder may be written as a bare string, and a single one without the list."""
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        return value
    return tuple({"path": item} if isinstance(item, str) else item for item in value)


def _placement(value: Any) -> Any:
    """Checked here as a whole: a union would answer with the faults of all its members."""
    if value == "auto":
        return value
    if not isinstance(value, dict):
        raise ValueError(f'want "auto" or a block of planes, got {value!r}')
    tiers = typing.get_args(TierName)
    for plane, choice in value.items():
        if plane not in PLANES:
            raise ValueError(f"has no plane {plane!r}: planes are {', '.join(PLANES)}")
        shares = choice if isinstance(choice, dict) else {choice: 1.0}
        for tier, share in shares.items():
            if tier not in tiers:
                raise ValueError(f"puts {plane} on {tier!r}: want one of {', '.join(tiers)}, or shares of them")
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(f"gives {plane} the share {share!r} on {tier}: want a number from 0 to 1")
        if abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of {plane} sum to {sum(shares.values()):g}, want 1")
    return value


class TiersConfig(Block):
    """What each tier may hold and what lies where."""

    device_bytes: Bytes | None = Field(
        default=None, description="budget of device memory; null: what the machine offers"
    )
    host_bytes: Bytes | None = Field(
        default=None, description="budget of host memory; null: what the machine or cgroup offers"
    )
    nvme: Annotated[tuple[NvmePathConfig, ...], BeforeValidator(_paths), WithJsonSchema(_PATHS_SCHEMA)] = Field(
        default=(), description="folders for NVMe-resident state; state is striped over several"
    )
    placement: Annotated[Literal["auto"] | dict[PlaneName, PlaneChoice], BeforeValidator(_placement)] = own_auto(
        "auto",
        description="auto, or for each plane a tier or shares of tiers that sum to 1 (of param: to the nearest group)",
    )
    verify: Literal["always", "resume", "off"] = Field(
        default="resume", description="when checksums of NVMe state are checked"
    )
    generations: Annotated[int, Field(ge=1, le=3)] = Field(
        default=2,
        description="versions kept on NVMe; 1: in place, and a crash within a step cannot be resumed",
    )
    overlap_update: Literal["auto"] | bool = own_auto(
        "auto", description="update a group under the backward pass as soon as its gradient is final"
    )
    activations: Literal["auto", "keep", "device", "host", "nvme"] = own_auto(
        "auto",
        description="keep: what autograd saves stays; else blocks are computed again from inputs kept on that tier; auto: host "
        "with activation_checkpointing.cpu_checkpointing, else keep",
    )
    activation_bytes: Bytes | None = Field(
        default=None,
        description="host memory set aside for such inputs (on their way, with nvme), a limit; null: what host_bytes leaves, "
        "as much as steps show that they take, and nvme for what finds no room",
    )
    lookahead: Literal["auto"] | Count = own_auto(
        "auto",
        description="uses of groups that are fetched for ahead, at most; auto: what measured times and rates ask for",
    )
    job: str = Field(default="default", description="folder name under each NVMe path; one job per name at a time")
    io_backend: Literal["auto", "uring", "threads"] = own_auto("auto", description="how NVMe I/O is done")
    keep_state: bool = Field(
        default=False,
        description="keep the NVMe state after close; false: removed, unless a checkpoint pinned it",
    )

    @field_validator("job")
    @classmethod
    def _job_is_a_name(cls, job: str) -> str:
        if not _JOB.fullmatch(job):
            raise ValueError(
                "want a folder name of 1 to 64 letters, digits, '.', '_' or '-' "
                f"that starts with a letter or digit, got {job!r}"
            )
        return job

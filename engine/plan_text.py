"""The placement in print: what lies where, with its bytes, and why."""

from dataclasses import dataclass
from typing import Any

from lamina.tiers import Tier
from lamina.zero import ZeroRuntime

from .config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The placement, ready to be printed."""

    text: str
    placement: dict[str, Any]

    def __str__(self) -> str:
        return self.text


def plan_text(settings: EngineConfig, runtime: ZeroRuntime) -> TrainingPlan:
    """The plan of a runtime that was built."""
    placement = runtime.placement
    lines = []
    tiers: dict[str, Any] = {}
    for tier, items, budget, arena in (
        (Tier.DEVICE, placement.device_items, settings.tiers.device_bytes, runtime.device),
        (Tier.HOST, placement.host_items, settings.tiers.host_bytes, runtime.host),
        (Tier.NVME, placement.nvme_items, None, None),
    ):
        total = sum(items.values())
        limit = f" of {budget:,}" if budget is not None else ""
        pages = f", {arena.page_kind} pages" if arena is not None and arena.nbytes else ""
        lines.append(f"{tier}: {total:,}{limit} bytes{pages}")
        lines += [f"    {size:>16,}  {name}" for name, size in items.items()]
        tiers[str(tier)] = {"bytes": total, "budget": budget, "items": dict(items)}
    homes = {
        segment.name: {"param": str(segment.param_tier), "state": str(segment.state_tier)}
        for segment in runtime.segments
    }
    streamed = sum(1 for segment in runtime.segments if not segment.in_place)
    lines.append(f"{streamed} of {len(homes)} segments are fetched for use, the others are at home in memory")
    lines.append(
        f"updates go through {placement.staging_count} buffers of {placement.sub_group_numel:,} elements"
        if placement.staging_count
        else "updates run in place in memory"
    )
    if runtime.io is not None:
        lines.append(f"I/O backend: {runtime.io.backend}")
    lines.append(
        "updates start under the backward pass" if runtime.early_segments else "updates start after the backward pass"
    )
    lines += list(placement.reasons)
    return TrainingPlan(text="\n".join(lines), placement={"tiers": tiers, "homes": homes})

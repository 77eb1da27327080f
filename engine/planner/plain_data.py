"""Plans as plain data for JSON: byte counts, seconds and names."""

import math
from typing import Any

from lamina.engine.planner.flops import MODEL_FLOPS_FORMULA
from lamina.engine.planner.items import Phase
from lamina.engine.planner.options import Advice, Option, Plan
from lamina.engine.planner.placement import TIERS


def plan_data(answer: Plan) -> dict[str, Any]:
    """The whole answer."""
    model, machine = answer.question.model, answer.question.machine
    best = answer.best
    return {
        "model": {
            "name": model.name,
            "params": model.total_params,
            "trainable_params": model.trainable_params,
            "active_params": model.active_params,
            "layers": model.layers,
            "hidden": model.hidden,
            "notes": list(model.notes),
        },
        "machine": {"name": machine.name, "hosts": machine.hosts, "devices_per_host": machine.devices_per_host},
        "mfu_formula": MODEL_FLOPS_FORMULA,
        "options": [option_data(item) for item in answer.options],
        "recommended": None if best is None else best.label,
        "reason": answer.reason,
        "next": [advice_data(item) for item in answer.advice],
        "largest_model": None
        if answer.largest is None
        else {
            "params": answer.largest.total_params,
            "layers": answer.largest.layers,
            "hidden": answer.largest.hidden,
        },
    }


def option_data(item: Option) -> dict[str, Any]:
    """One placement: bytes by tier, kind and phase of the fullest rank, limits, seconds by channel."""
    place, time = item.case.place, item.time
    tiers = {}
    for tier in TIERS:
        tiers[tier] = {
            phase.value: {kind.value: nbytes for kind, nbytes in item.held.of(tier, phase).items()} for phase in Phase
        }
    uses = {
        use.tier: {"need": use.need, "limit": use.limit, "peak_phase": use.phase, "fits": use.fits}
        for use in item.verdict.tiers
    }
    over = item.verdict.overfull
    return {
        "label": item.label,
        "stage": place.stage,
        "param": place.param,
        "optimizer": place.optimizer,
        "grad": place.grad,
        "activations": place.activations,
        "fits": item.fits,
        "runs": item.runs,
        "obstacles": list(item.obstacles),
        "offender": None if over is None or over.offender is None else [over.tier, over.offender[0].value],
        "causes": [str(cause) for cause in item.verdict.causes],
        "tiers": uses,
        "bytes_per_rank": tiers,
        "arena_bytes_per_rank": {tier: item.held.arena_peak(tier) for tier in TIERS},
        "checkpoint_bytes_per_rank": item.held.checkpoint_bytes,
        "step_s": time.step_s,
        "lower_bound_s": time.lower_bound_s,
        "binding": time.binding,
        "passes_s": dict(time.passes),
        "update_s": dict(time.update),
        "tokens_per_s": time.tokens_per_s,
        "mfu": time.mfu,
        "pipeline_bubble": time.bubble,
        "serial_efficiency": dict(time.efficiency),
        "wear": None
        if item.wear is None
        else {
            "bytes_per_step": item.wear.bytes_per_step,
            "steps_to_rated": item.wear.steps_to_rated,
            "days_to_rated": item.wear.days_to_rated,
        },
    }


def advice_data(item: Advice) -> dict[str, Any]:
    """One piece of advice; a gain from nothing is null."""
    return {"what": item.what, "label": item.label, "gain": item.gain if math.isfinite(item.gain) else None}

"""What `lamina plan` prints."""

import math
from collections.abc import Mapping

from lamina.bench.planner.rows import rows_of
from lamina.bench.report import Reporter
from lamina.engine.planner import Option, Phase, Plan
from lamina.engine.planner.conventions import (
    deepspeed_zero2,
    deepspeed_zero3,
    infinity_memory,
    zero_paper_gb,
)
from lamina.engine.planner.emit_config import budget_bytes
from lamina.engine.planner.flops import MODEL_FLOPS_FORMULA
from lamina.engine.planner.items import Kind
from lamina.engine.planner.placement import DEVICE, HOST, NVME, TIERS
from lamina.engine.planner.quantity import GB, format_bytes, format_count, format_seconds
from lamina.engine.planner.simulated import simulated_step

LEFT_OUT = (
    "Not counted: other processes' use of the device, temporary workspaces of single operators, data loading, and "
    "a GPU allocator's fragments (a few percent of the activations)."
)


def print_plan(report: Reporter, answer: Plan) -> None:
    """The question in two lines, all placements, the recommendation, advice and the largest model."""
    _question(report, answer)
    shared = answer.question.machine.shared_memory
    columns = ["placement", "fits"]
    columns += ["memory / host"] if shared else ["device / rank", "host / host"]
    columns += ["nvme / host", "peak in", "step", "binding", "tokens/s", "MFU", "in the way"]
    rows = [_row(label, item, shared) for label, item in rows_of(answer.options)]
    report.table("Placements, fastest first", columns, rows)
    for why in dict.fromkeys(why for item in answer.options for why in item.obstacles):
        report.line(f'"not here": for comparison; {why}.')
    report.line(f"Recommended: {answer.reason}.")
    best = answer.best
    if best is None:
        for cause in answer.nearest.verdict.causes[:4]:
            report.line(f"  - {cause}")
    elif best.wear is not None and best.wear.steps_to_rated is not None:
        report.line(
            f"Drive wear: {format_bytes(best.wear.bytes_per_step)} written a step and host; rated endurance after "
            f"{best.wear.steps_to_rated} steps ({best.wear.days_to_rated:.3g} days without a pause)."
        )
    for item in answer.advice[:6]:
        gain = "makes it fit" if math.isinf(item.gain) else f"{item.gain:.2f} x tokens/s"
        report.line(f"Next: {item.what}: {gain} ({item.label})")
    if answer.largest is not None:
        big = answer.largest
        report.line(
            f"Largest model of this kind that fits here: {format_count(big.total_params)} parameters "
            f"({big.layers} blocks of width {big.hidden})."
        )
    report.line(LEFT_OUT)
    report.line()


def _question(report: Reporter, answer: Plan) -> None:
    model, load, machine = answer.question.model, answer.question.load, answer.question.machine
    trained = ""
    if model.trainable_params != model.total_params:
        trained = f", {format_count(model.trainable_params)} of them trained"
    report.line(
        f"{model.name}: {format_count(model.total_params)} parameters{trained}, {model.layers} blocks of width "
        f"{model.hidden}; {load.dtype}, {load.optimizer}, {load.micro_batch} x {load.sequence} tokens x "
        f"{load.accumulation} micro-batches a rank, "
        + (f"checkpoints every {load.checkpoint_interval}" if load.checkpoint_interval else "no checkpointing")
    )
    device = "" if machine.shared_memory else f" with {format_bytes(machine.device_bytes)}"
    reserve = machine.host_reserve_bytes
    kept = f" ({format_bytes(reserve)} of it left to all else)" if reserve else ""
    report.line(
        f"{machine.name}: {machine.hosts} x {machine.devices_per_host} ranks{device}, "
        f"{format_bytes(machine.host_bytes)} host memory{kept}, {format_bytes(machine.nvme_bytes)} nvme a host"
        + ("" if machine.nvme_bytes else " (placements on nvme left out: give --nvme-path or nvme=…)")
    )
    for note in (*machine.notes, *model.notes):
        report.line(f"note: {note}")
    report.line()


def _row(label: str, item: Option, shared: bool) -> list[str]:
    uses = {use.tier: use for use in item.verdict.tiers}
    over = item.verdict.overfull
    shown = over if over is not None else uses[HOST if shared else DEVICE]
    fits = "yes" if item.fits else "no"
    row = [label, fits if item.runs else "not here"]
    row += [format_bytes(uses[tier].need) for tier in ((HOST,) if shared else (DEVICE, HOST))]
    blame = ""
    if over is not None and over.offender is not None:
        blame = f"{over.tier}: {over.offender[0]} {format_bytes(over.offender[1])}"
    row += [format_bytes(uses[NVME].need), shown.phase, format_seconds(item.time.step_s), item.time.binding]
    return [*row, f"{item.time.tokens_per_s:.4g}", f"{item.time.mfu:.1%}", blame]


def print_explanation(report: Reporter, item: Option) -> None:
    """Every figure of one placement."""
    report.line(f"{item.label} in full")
    for tier in TIERS:
        phases = [phase for phase in Phase if item.held.of(tier, phase)]
        kinds = [kind for kind in Kind if any(kind in item.held.of(tier, phase) for phase in phases)]
        if not kinds:
            continue
        rows = []
        for kind in kinds:
            cells = [format_bytes(item.held.of(tier, phase).get(kind, 0)) for phase in phases]
            rows.append([kind.value, *cells])
        peaks = item.held.peaks(tier)
        rows.append(["sum", *(format_bytes(peaks[phase]) for phase in phases)])
        report.table(f"{tier}, one rank, by phase", ["kind", *(phase.value for phase in phases)], rows)
    rows = [[entry.tier, entry.kind.value, format_bytes(entry.nbytes), entry.formula] for entry in item.held.items]
    report.table("How each figure comes about", ["tier", "kind", "bytes", "formula"], rows)
    _print_time(report, item)
    budgets = {tier: budget_bytes(item, tier) for tier in (DEVICE, HOST)}
    report.line(
        "Byte budgets of one rank (tiers.device_bytes, tiers.host_bytes): "
        + ", ".join(f"{tier} {nbytes:,}" for tier, nbytes in budgets.items())
    )
    report.line(f"One checkpoint of one rank: {format_bytes(item.held.checkpoint_bytes)}, beside the above.")
    report.line()


def _print_time(report: Reporter, item: Option) -> None:
    time = item.time
    rows = []
    for name in {**time.passes, **time.update}:
        alone = time.efficiency.get(name)
        rows.append(
            [
                name,
                format_seconds(time.passes.get(name, 0.0)),
                format_seconds(time.update.get(name, 0.0)),
                "" if alone is None else f"{alone:.1%}",
            ]
        )
    columns = ["channel", "forward + backward", "update", "efficiency if nothing overlapped"]
    report.table("Busy time of each channel in a step", columns, rows)
    report.line(
        f"Step {format_seconds(time.step_s)} = passes {format_seconds(time.passes_s)} + update "
        f"{format_seconds(time.update_s)}; lower bound {format_seconds(time.lower_bound_s)} "
        f"(ratio {time.bound_ratio:.2f}); pipeline bubble {time.bubble:.1%}; binding: {time.binding}."
    )
    if item.runs and not item.case.buffers.max_live:
        simulated = simulated_step(item.case)
        report.line(
            f"Simulated as the engine does for its own choice: {format_seconds(simulated.step_s)}, passes "
            f"{format_seconds(simulated.passes_s)} + update {format_seconds(simulated.update_s)}."
        )
    report.line(f"MFU {time.mfu:.1%} = model operations / (step x peak); model operations = {MODEL_FLOPS_FORMULA}.")


def print_comparison(report: Reporter, answer: Plan, variants: Mapping[str, Plan]) -> None:
    """The recommended placement before and after each change."""
    rows = []
    before = answer.best
    for text, variant in {"as asked": answer, **variants}.items():
        best = variant.best
        if best is None:
            rows.append([text, "nothing fits", "", "", ""])
            continue
        gain = "" if before is None else f"{best.time.tokens_per_s / before.time.tokens_per_s:.2f} x"
        rows.append([text, best.label, format_seconds(best.time.step_s), f"{best.time.tokens_per_s:.4g}", gain])
    report.table("What if", ["change", "recommended", "step", "tokens/s", "gain"], rows)


def print_conventions(report: Reporter, answer: Plan, name: str) -> None:
    """Another formula's figures beside ours."""
    model, machine = answer.question.model, answer.question.machine
    params, ranks = model.total_params, machine.ranks
    if name == "infinity":
        _print_infinity(report, answer)
        return
    rows = []
    for item in answer.options:
        place = item.case.place
        if NVME in (place.param, place.optimizer):
            continue
        ours = [format_bytes(item.held.peak(DEVICE)), format_bytes(item.held.host_peak(HOST))]
        theirs = ["-", "-"]
        if name == "zero-paper" and place.optimizer == DEVICE:
            theirs = [format_bytes(zero_paper_gb(params, place.stage, ranks) * GB), "-"]
        elif name == "deepspeed" and place.stage in (2, 3):
            shape = {"params": params, "devices_per_host": machine.devices_per_host, "hosts": machine.hosts}
            offload = place.optimizer != DEVICE
            if place.stage == 2:
                figure = deepspeed_zero2(**shape, offload_optimizer=offload)
            else:
                figure = deepspeed_zero3(
                    **shape,
                    largest_layer=model.params.largest_param,
                    offload_param=place.param != DEVICE,
                    offload_optimizer=offload,
                    zero_init=answer.question.buffers.zero_init,
                )
            theirs = [format_bytes(figure.device_bytes), format_bytes(figure.host_bytes)]
        rows.append([item.label, *theirs, *ours])
    columns = ["placement", f"{name}: device", f"{name}: host", "ours: device", "ours: host"]
    report.table(f"Beside the convention {name} (states only: no activations, windows, runtime)", columns, rows)


def _print_infinity(report: Reporter, answer: Plan) -> None:
    model, load, machine = answer.question.model, answer.question.load, answer.question.machine
    figure = infinity_memory(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        sequence=load.sequence,
        node_batch=load.micro_batch * machine.devices_per_host,
        gpu_batch=load.micro_batch,
        interval=load.checkpoint_interval or 1,
    )
    rows = [
        ["parameters (12 x layers x hidden^2)", format_count(figure.params), format_count(model.total_params)],
        ["model states, TiB", f"{figure.states_tib:.4g}", ""],
        ["activations of a host, TiB", f"{figure.activations_tib:.4g}", ""],
        ["activation checkpoints of a host, TiB", f"{figure.checkpoints_tib:.4g}", ""],
        ["model state working memory, GiB", f"{figure.mswm_gib:.4g}", ""],
        ["activation working memory, GiB", f"{figure.awm_gib:.4g}", ""],
    ]
    report.table("Beside the convention infinity (20 bytes per parameter)", ["figure", "infinity", "ours"], rows)

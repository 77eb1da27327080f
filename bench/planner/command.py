"""`lamina plan MODEL`: what fits where, how fast, and what to change. Without MODEL: predictions against
measurements.

lamina plan llama-7b --machine rtx4090 --sequence 2048 lamina plan path/to/config.json --machine h100
--what-if host=4TB,nvme=16 --plot plan.png lamina plan layers=24,hidden=1024,heads=16 --machine this
--nvme-path /data --emit-config config.json

Exit code 0 when a placement fits (or every check passed), 1 when none does, 2 for wrong input.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lamina.bench.given_path import check_target
from lamina.bench.planner.machine import find_machine
from lamina.bench.planner.printed import print_comparison, print_conventions, print_explanation, print_plan
from lamina.bench.report import Reporter
from lamina.engine.planner import (
    MACHINE_PRESETS,
    MODEL_PRESETS,
    Buffers,
    LoraShape,
    ModelShape,
    Option,
    Plan,
    PlanError,
    Question,
    Workload,
    emit_config,
    plan,
    plan_data,
    read_model,
)
from lamina.engine.planner.quantity import parse_number
from lamina.engine.planner.state_bytes import DType, Optimizer, as_dtype
from lamina.engine.planner.workload import Attention

_LOAD_CHANGES = ("micro_batch", "sequence", "accumulation", "checkpoint_interval")


def parser() -> argparse.ArgumentParser:
    """The options of `lamina plan`."""
    made = argparse.ArgumentParser(prog="lamina plan", description="What fits where, how fast, and what to change.")
    made.add_argument(
        "model",
        nargs="?",
        help="preset, config.json, safetensors file or index, folder, or layers=…,hidden=…,heads=… "
        f"(presets: {', '.join(MODEL_PRESETS)}); without it, predictions are checked on this machine",
    )
    made.add_argument(
        "--machine",
        default="this",
        help=f"this (default), a JSON file, or one of {', '.join(MACHINE_PRESETS)}",
    )
    made.add_argument(
        "--set", default="", metavar="KEY=VALUE,…", help="change the machine: host=256GB,devices=4,nvme=2"
    )
    made.add_argument("--profile", type=Path, help="rates of this machine, as `lamina nvme --save` writes them")
    made.add_argument("--ranks", type=int, default=1, help="ranks on this machine (--machine this)")
    made.add_argument("--nvme-path", help="folder for state on nvme")
    _add_workload(made.add_argument_group("workload"))
    _add_placement(made.add_argument_group("placement"))
    _add_output(made.add_argument_group("output"))
    return made


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--micro-batch", type=int, default=1, help="sequences of one rank in one pass")
    group.add_argument("--sequence", type=int, default=1024, help="tokens of one sequence")
    group.add_argument("--accumulation", type=int, default=1, help="micro-batches of one step")
    group.add_argument("--dtype", default="bf16", choices=[kind.value for kind in DType])
    group.add_argument("--optimizer", default="adamw", choices=[kind.value for kind in Optimizer])
    group.add_argument("--checkpointing", type=int, default=1, metavar="N", help="keep every Nth block's input; 0: off")
    group.add_argument("--attention", default="flash", choices=[kind.value for kind in Attention])
    group.add_argument(
        "--no-barrier", action="store_true", help="no clipping, no scaler: update under the backward pass"
    )
    group.add_argument("--lora-rank", type=int, help="train low-rank adapters only")
    group.add_argument("--lora-targets", default="attention", help="attention, mlp or q,k,v,o,up,gate,down")
    group.add_argument("--trainable", help="number of trainable parameters, such as 1e6")


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stage", type=int, action="append", choices=[0, 1, 2, 3], help="only these stages")
    group.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    group.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    group.add_argument("--activations", default="device", choices=["device", "host", "nvme"])
    group.add_argument("--lookahead", type=int, default=2, help="groups fetched ahead")
    group.add_argument("--sub-group", default=str(1 << 22), help="elements updated at a time")
    group.add_argument("--generations", type=int, default=2, help="versions of the state on nvme")
    group.add_argument("--checkpoints-kept", type=int, default=0, help="checkpoints that pin a generation")
    group.add_argument("--reduce-bucket", help="elements of a reduction bucket")
    group.add_argument("--max-live", help="elements gathered at once")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--what-if", action="append", default=[], metavar="KEY=VALUE,…", help="also plan with changes")
    group.add_argument(
        "--convention", choices=["deepspeed", "zero-paper", "infinity"], help="show other formulas beside"
    )
    group.add_argument("--explain", action="store_true", help="every figure of the recommended placement")
    group.add_argument("--option", help="explain or emit the placement with this label instead of the recommended one")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="bytes by tier and seconds by channel")
    group.add_argument(
        "--timeline", type=Path, metavar="FILE.png", help="the simulated step in lanes; also as FILE.json"
    )
    group.add_argument("--emit-config", type=Path, metavar="FILE", help="write a config for initialize()")
    group.add_argument("--json", action="store_true", help="one line of JSON on stdout, the rest on stderr")
    group.add_argument("--quick", action="store_true", help="check only: two small configurations")
    group.add_argument("--only", metavar="REGEX", help="check only: configurations whose label matches")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    given = parser().parse_args(list(argv))
    report = Reporter(as_json=given.json)
    if given.model is None:
        # Only the check trains anything, so only it needs torch.
        from lamina.bench.planner.check import check

        return check(report, nvme_path=given.nvme_path, quick=given.quick, only=given.only)
    question = question_of(given)
    answer = plan(question)
    # All that may be refused comes before the first line of output.
    variants = {text: plan(changed(question, text), with_largest=False) for text in given.what_if}
    item = _shown_option(answer, given.option)
    if given.emit_config is not None:
        if item is None or not item.fits:
            raise PlanError(f"--emit-config: no config is written, {answer.reason}")
        emit_config(item)
    if given.timeline is not None and (item is None or not item.fits):
        raise PlanError(f"--timeline: there is no step to draw, {answer.reason}")
    if given.timeline is not None:
        from lamina.bench.timeline import require_drawable

        check_target("--timeline", given.timeline)
        require_drawable(given.timeline)
    print_plan(report, answer)
    if given.convention:
        print_conventions(report, answer, given.convention)
    if variants:
        print_comparison(report, answer, variants)
    if given.explain:
        print_explanation(report, item if item is not None else answer.options[0])
    _write_files(given, report, answer, item)
    data = plan_data(answer)
    if variants:
        data["what_if"] = {text: plan_data(variant) for text, variant in variants.items()}
    report.json(data)
    return 0 if answer.best is not None else 1


def _shown_option(answer: Plan, label: str | None) -> Option | None:
    """The option with this label; without a label the recommended one. Raises PlanError for an unknown
    label."""
    if label is None:
        return answer.best
    found = [option for option in answer.options if option.label == label]
    if not found:
        labels = "; ".join(option.label for option in answer.options)
        raise PlanError(f"--option: {label!r} is no placement of this plan; there are: {labels}")
    return found[0]


def _write_files(given: argparse.Namespace, report: Reporter, answer: Plan, item: Option | None) -> None:
    if given.emit_config is not None and item is not None:
        path = given.nvme_path or "lamina-nvme"
        given.emit_config.write_text(json.dumps(emit_config(item, nvme_path=path), indent=2) + "\n")
        report.line(f"config of {item.label} written to {given.emit_config}")
    if given.plot is not None:
        # matplotlib is an extra: only a plot needs it.
        from lamina.bench.planner.plot import draw

        draw(answer, given.plot)
        report.line(f"plot written to {given.plot}")
    if given.timeline is not None and item is not None:
        from lamina.bench.planner.timeline import write_timeline

        report.line(write_timeline(item, given.timeline))


def question_of(given: argparse.Namespace) -> Question:
    """The question that the command line asks. Raises PlanError."""
    model = read_model(given.model)
    if given.lora_rank is not None:
        targets = tuple(part.strip() for part in given.lora_targets.split(","))
        model = replace(model, lora=LoraShape(rank=given.lora_rank, targets=targets))
    if given.trainable is not None:
        model = replace(model, trainable=int(parse_number(given.trainable, what="--trainable")))
    load = Workload(
        micro_batch=given.micro_batch,
        sequence=given.sequence,
        accumulation=given.accumulation,
        dtype=as_dtype(given.dtype),
        optimizer=Optimizer(given.optimizer),
        checkpoint_interval=given.checkpointing,
        attention=Attention(given.attention),
        barrier=not given.no_barrier,
    )
    machine = find_machine(
        given.machine,
        ranks=given.ranks,
        dtype=load.dtype,
        nvme_path=given.nvme_path,
        profile=given.profile,
        changes=pairs(given.set),
    )
    buffers = Buffers(
        lookahead=given.lookahead,
        sub_group=_count(given.sub_group, "--sub-group") or 0,
        generations=given.generations,
        checkpoints_kept=given.checkpoints_kept,
        reduce_bucket=_count(given.reduce_bucket, "--reduce-bucket"),
        max_live=_count(given.max_live, "--max-live"),
    )
    return Question(
        model=_checked(model, load),
        load=load,
        machine=machine,
        buffers=buffers,
        stages=tuple(sorted(set(given.stage or (0, 1, 2, 3)))),
        tensor=given.tensor,
        pipeline=given.pipeline,
        activations=given.activations,
    )


def _count(text: str | None, what: str) -> int | None:
    return None if text is None else int(parse_number(text, what=what))


def _checked(model: ModelShape, load: Workload) -> ModelShape:
    if model.positions and load.sequence > model.positions:
        note = f"sequence {load.sequence} exceeds the {model.positions} learned positions"
        return replace(model, notes=(*model.notes, note))
    return model


def pairs(text: str) -> dict[str, str]:
    """`host=256GB,nvme=2` as a mapping. Raises PlanError for a part without `=`."""
    result = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise PlanError(f"{part!r}: write KEY=VALUE, such as host=256GB")
        result[key.strip()] = value.strip()
    return result


def changed(question: Question, text: str) -> Question:
    """The question with `--what-if` changes of machine or workload. Raises PlanError for unknown keys."""
    values = pairs(text)
    numbers = {key: int(parse_number(values.pop(key), what=key)) for key in _LOAD_CHANGES if key in values}
    load = replace(question.load, **numbers)  # type: ignore[arg-type]
    return replace(question, load=load, machine=question.machine.with_changes(values))

"""Holes of the C library's heap, as part of the plan for a machine whose tiers are one memory."""

import pytest

from lamina.engine.planner import (
    Case,
    Kind,
    Machine,
    ModelShape,
    Phase,
    Placement,
    Workload,
    footprint,
    machine_preset,
)
from lamina.engine.planner.fragments import recomputing_share

GPT = ModelShape(name="gpt", layers=8, hidden=512, heads=8, vocab=256, positions=256)
CPU = machine_preset("cpu")


def bytes_in_backward(load: Workload, machine: Machine = CPU) -> dict[Kind, int]:
    case = Case(model=GPT, load=load, machine=machine, place=Placement(stage=3, param="nvme", optimizer="nvme"))
    return footprint(case).of("device", Phase.BACKWARD)


@pytest.mark.parametrize(
    ("token_bytes", "measured"),
    [(512, (0.0, 0.2)), (1024, (0.35, 0.8)), (2048, (0.9, 2.0)), (4096, (1.7, 2.0)), (1 << 20, (1.7, 2.0))],
)
def test_the_share_is_what_was_measured(token_bytes: int, measured: tuple[float, float]) -> None:
    assert measured[0] <= recomputing_share(token_bytes, 0.15) <= measured[1]


def test_few_tokens_leave_the_share_as_it_is() -> None:
    assert recomputing_share(1, 0.15) == recomputing_share(512, 0.15) == 0.15


@pytest.mark.parametrize("interval", [0, 1])
def test_holes_are_a_share_of_what_a_pass_makes_and_frees(interval: int) -> None:
    held = bytes_in_backward(Workload(micro_batch=2, sequence=256, dtype="fp32", checkpoint_interval=interval))
    made = sum(held.get(kind, 0) for kind in (Kind.ACTIVATIONS, Kind.LOGITS, Kind.IN_FLIGHT))
    assert made > 0
    assert bool(interval) == (Kind.CHECKPOINTS in held)
    assert held[Kind.FRAGMENTS] == pytest.approx(made * (1.35 if interval else CPU.fragment_share), rel=0.01)


def test_a_machine_without_holes_has_none_where_blocks_are_computed_again() -> None:
    load = Workload(micro_batch=2, sequence=256, dtype="fp32", checkpoint_interval=1)
    assert Kind.FRAGMENTS not in bytes_in_backward(load, CPU.with_changes({"fragment_share": 0.0}))

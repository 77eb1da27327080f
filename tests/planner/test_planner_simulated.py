"""The planner's step times and those by which the engine chooses a placement are one prediction, seen from two sides."""

import pytest

from lamina.engine.planner import (
    Case,
    Placement,
    PlanError,
    Workload,
    all_placements,
    machine_preset,
    model_preset,
    step_time,
)
from lamina.engine.planner.obstacles import obstacles
from lamina.engine.planner.simulated import placement_question, simulated_step

LOADS = (
    Workload(),
    Workload(micro_batch=8, checkpoint_interval=0),
    Workload(dtype="fp32", accumulation=3),
    Workload(micro_batch=4, barrier=False),
)
PLACES = [place for place in all_placements(stages=(3,)) if place.grad != "nvme"]


@pytest.mark.parametrize("machine", ["cpu-16", "rtx4090"])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.dtype}-{load.micro_batch}-{load.accumulation}")
def test_formula_and_simulation_agree(machine: str, load: Workload) -> None:
    compared = 0
    for place in PLACES:
        case = Case(model=model_preset("gpt2-medium"), load=load, place=place, machine=machine_preset(machine))
        if any(obstacles(case)):
            continue
        formula, simulated = step_time(case), simulated_step(case)
        assert formula.step_s == pytest.approx(simulated.step_s, rel=0.2), place.label
        compared += 1
    assert compared >= 5


def test_question_is_the_engines_own() -> None:
    place = Placement(stage=3, param="nvme", optimizer="nvme")
    case = Case(model=model_preset("gpt2"), load=Workload(), place=place, machine=machine_preset("cpu-16"))
    placed = placement_question(case).place()
    assert {(home.param, home.state) for home in placed.homes.values()} == {("nvme", "nvme")}
    assert placed.nvme_bytes == sum(case.needs.nvme_items().values())


def test_what_the_engine_does_not_run_is_not_simulated() -> None:
    case = Case(model=model_preset("gpt2"), load=Workload(), place=Placement(stage=0), machine=machine_preset("h100"))
    with pytest.raises(PlanError, match="updates run on the CPU"):
        simulated_step(case)

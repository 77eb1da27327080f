"""The planner's step times and those by which the engine chooses a placement are one prediction, seen from two sides."""

from dataclasses import replace

import pytest

from lamina.engine.planner import (
    Case,
    Machine,
    ModelShape,
    Placement,
    PlanError,
    Workload,
    all_placements,
    machine_preset,
    model_preset,
    step_time,
)
from lamina.engine.planner.channel_bytes import Channel, channel_bytes
from lamina.engine.planner.flops import step_flops
from lamina.engine.planner.obstacles import obstacles
from lamina.engine.planner.simulated import placement_question, simulated_step
from lamina.engine.planner.step_time import compute_seconds

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


def cpu_case(machine: Machine, **load: object) -> Case:
    """All on nvme, updates under the backward pass, one block of the way back a quarter of it."""
    model = ModelShape(name="m", layers=4, hidden=256, heads=4, vocab=256)
    place = Placement(stage=3, param="nvme", optimizer="nvme")
    return Case(model=model, load=Workload(barrier=False, **load), place=place, machine=machine)  # type: ignore[arg-type]


@pytest.mark.parametrize(("interval", "before"), [(0, 1 / 3 + 2 / 3 / 4), (1, 1 / 4 + 3 / 4 / 4)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_early_update_starts_with_the_first_gradient_that_is_final(
    interval: int, before: float, accumulation: int
) -> None:
    slow_disk = replace(machine_preset("cpu-16"), nvme_read_bandwidth=1e6, nvme_write_bandwidth=1e6, overlap_loss=0.0)
    found = step_time(cpu_case(slow_disk, checkpoint_interval=interval, accumulation=accumulation))
    share = (accumulation - 1 + before) / accumulation
    assert found.step_s == pytest.approx(max(found.passes_s * share + found.update_s, found.lower_bound_s))
    fast_disk = replace(slow_disk, nvme_read_bandwidth=1e15, nvme_write_bandwidth=1e15)
    quick = step_time(cpu_case(fast_disk, checkpoint_interval=interval, accumulation=accumulation))
    assert quick.step_s < quick.passes_s + quick.update_s


def test_collectives_between_processes_take_the_cores_that_compute() -> None:
    two = replace(machine_preset("cpu-16"), devices_per_host=2, peer_bandwidth=1e9, overlap_loss=0.0)
    model, load = ModelShape(name="m", layers=4, hidden=256, heads=4, vocab=256), Workload()
    case = Case(model=model, load=load, place=Placement(stage=3, param="device", optimizer="host"), machine=two)
    found = step_time(case)
    moved = channel_bytes(case).passes[Channel.COLLECTIVE]
    assert moved > 0
    assert found.passes[Channel.COMPUTE] == pytest.approx(compute_seconds(case)[0] + moved / 1e9)
    assert Channel.COLLECTIVE not in found.passes


def test_blocks_are_computed_again_up_to_the_product_that_ends_them() -> None:
    model = ModelShape(name="m", layers=6, hidden=64, heads=4, ffn=96, vocab=50, bias=False, norm_bias=False)
    again = {}
    for interval in (0, 1, 2, 6):
        flops = step_flops(model, Workload(sequence=32, checkpoint_interval=interval))
        again[interval] = flops.hardware_per_token - flops.model_per_token
        assert flops.forward_share == flops.forward_per_token / flops.hardware_per_token
    head, last, forward = 2 * 50 * 64, 2 * 96 * 64, flops.forward_per_token
    assert again == {0: 0, 1: forward - head - 6 * last, 2: forward - head - 3 * last, 6: forward - head - last}

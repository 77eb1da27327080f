"""The step of a case as the tier layer simulates it: the very prediction by which the engine chooses a placement."""

from lamina.engine.planner.case import Case
from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.flops import step_flops
from lamina.engine.planner.footprint import footprint
from lamina.engine.planner.obstacles import obstacles
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import update_read_bytes_per_param, update_write_bytes_per_param
from lamina.engine.planner.step_time import compute_seconds
from lamina.tiers import PlacementQuestion
from lamina.tiers.links.bandwidth import DISK, TO_DEVICE, BandwidthModel, Curve, Link
from lamina.tiers.placement.homes import Budgets
from lamina.tiers.simulation.simulate import Simulation
from lamina.tiers.simulation.step_model import ComputeTimes


def simulated_step(case: Case) -> Simulation:
    """Raises PlanError for what this engine does not run, or a rate that is missing."""
    for why in obstacles(case):
        raise PlanError(f"{case.place.label}: cannot be simulated, {why}")
    question = placement_question(case)
    return question.predict(question.place())


def placement_question(case: Case) -> PlacementQuestion:
    """What the engine would ask of the tier layer on this machine: this placement alone, within its own budgets."""
    held = footprint(case)
    budgets = {tier: held.arena_peak(tier) or None for tier in (DEVICE, HOST)}
    return PlacementQuestion(
        segments=case.segments,
        budgets=Budgets(device_bytes=budgets[DEVICE], host_bytes=budgets[HOST]),
        wishes=case.wishes,
        links=_links(case),
        times=_times(case),
        generations=case.buffers.generations,
        together=case.slice.places_together,
        micro_batches=case.load.accumulation,
        lookahead=case.buffers.lookahead,
    )


def _times(case: Case) -> ComputeTimes:
    seconds, _ = compute_seconds(case)
    one = seconds / case.load.accumulation * step_flops(case.model, case.load).forward_share
    load, machine = case.load, case.machine
    per_element = load.grad_bytes + update_read_bytes_per_param(load.dtype, load.optimizer)
    per_element += update_write_bytes_per_param(load.dtype, load.optimizer)
    host = machine.rate("host_bandwidth", "the update") / machine.devices_per_host
    return ComputeTimes.proportional(
        case.segments,
        forward_s=one,
        backward_s=seconds / case.load.accumulation - one,
        adam_elements_per_s=host / per_element,
    )


def _links(case: Case) -> BandwidthModel:
    machine, place = case.machine, case.place
    links = []
    if NVME in (place.param, place.optimizer):
        read, write = (Curve.flat(machine.rate(f"nvme_{way}_bandwidth", "state on nvme")) for way in ("read", "write"))
        gain = 2.0 if machine.nvme_full_duplex else 1.0
        links.append(Link(name=DISK, read=read, write=write, mix_gain=gain, sharers=machine.devices_per_host))
    if case.wishes.separate_device:
        rate = Curve.flat(machine.device_rate_from("host", active=machine.devices_per_host))
        links.append(Link(name=TO_DEVICE, read=rate, write=rate))
    return BandwidthModel(links)

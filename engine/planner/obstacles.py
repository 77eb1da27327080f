"""What this engine does not do, though a machine could: such placements are shown for comparison and never recommended."""

from collections.abc import Iterator

from lamina.engine.planner.case import Case
from lamina.engine.planner.placement import DEVICE, NVME
from lamina.engine.planner.state_bytes import TIERED


def obstacles(case: Case) -> Iterator[str]:
    """Why the engine would not run this case, in words that a table can show; nothing when it runs."""
    place, load, machine = case.place, case.load, case.machine
    if not machine.shared_memory and place.optimizer == DEVICE:
        yield "updates run on the CPU: optimizer state is in host memory or on nvme"
    if place.tensor > 1:
        yield "tensor parallelism is not there yet"
    if place.pipeline > 1:
        yield "pipeline parallelism is not there yet"
    if load.checkpoint_interval > 1 and place.activations != DEVICE:
        yield "inputs wait off the device for blocks that are computed again one by one: write an interval of 1"
    if load.optimizer not in TIERED and NVME in (place.param, place.optimizer):
        yield f"the state of {load.optimizer} stays in memory"

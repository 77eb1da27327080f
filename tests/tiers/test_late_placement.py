"""Which updates come late: only where the simulated step gets shorter, within the budgets, and of what is on NVMe alone."""

from dataclasses import replace

import pytest
from simulated_links import links
from small_questions import MIB, segment

from lamina.tiers import Budgets, ComputeTimes, Home, PlacementQuestion, Tier, Wishes, choose, explain

NUMBER = 12
NUMEL = 4 * MIB


def question(forward_s: float, host_mib: int = 330) -> PlacementQuestion:
    segments = tuple(segment(index, NUMEL, block=index > 0) for index in range(NUMBER))
    return PlacementQuestion(
        segments=segments,
        budgets=Budgets(device_bytes=4 * 8 * MIB, host_bytes=host_mib * MIB),
        wishes=Wishes(overlap_update=True, chunk_numel=MIB // 2, sub_group_numel=MIB, late_updates=True),
        links=links(2.6e9, 4.2e9, mix_gain=1.2),
        times=ComputeTimes.proportional(
            segments, forward_s=forward_s, backward_s=2 * forward_s, adam_elements_per_s=1e9
        ),
    )


@pytest.mark.parametrize("forward_s", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_late_updates_make_the_step_shorter_or_there_are_none(forward_s: float) -> None:
    asked = question(forward_s)
    found = choose(asked)
    without = choose(replace(asked, wishes=replace(asked.wishes, late_updates=False)))
    assert found.predicted.step_s <= without.predicted.step_s
    assert found.placement.host_bytes <= (asked.budgets.host_bytes or 0)
    late = [name for name, home in found.placement.homes.items() if home.late]
    assert not any(home.late for home in without.placement.homes.values())
    assert bool(late) == (found.predicted.step_s < without.predicted.step_s)
    if forward_s == 0.05:
        assert late
        told = str(explain(found))
        assert (
            f"memory goes to gradients of {len(late)} segments, so that their updates run under the next forward pass"
            in told
        )
        assert ", updated under the next forward pass" in told
    if forward_s == 0.0:
        assert not late


def test_what_is_in_memory_cannot_be_late() -> None:
    for home in ((Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)):
        with pytest.raises(ValueError, match="late updates are of what is on nvme only"):
            Home(param=home[0], state=home[1], late=True)

"""The chosen placement against every placement there is, on cases small enough to try them all."""

import itertools
import json
from dataclasses import replace

import pytest

from lamina.tiers import (
    BandwidthModel,
    Budgets,
    ComputeTimes,
    Curve,
    Home,
    Link,
    PlacementQuestion,
    SegmentSize,
    Tier,
    Wishes,
    choose,
    explain,
)
from lamina.tiers.bandwidth import DISK
from lamina.tiers.placement import Placement, _Planner

MIB = 1 << 20
GB = 1e9


def segment(index: int, numel: int = MIB) -> SegmentSize:
    return SegmentSize(
        name=f"block{index}",
        group=index,
        full_numel=numel,
        shard_numel=numel,
        param_itemsize=2,
        state_itemsizes=(2, 4, 4),
        grad_itemsize=2,
    )


def question(
    numels: list[int], *, device: int, host: int, passes_s: float, overlap: bool, read: float = 2.6 * GB
) -> PlacementQuestion:
    segments = tuple(segment(index, numel) for index, numel in enumerate(numels))
    disk = Link(name=DISK, read=Curve.flat(read), write=Curve.flat(1.6 * read))
    return PlacementQuestion(
        segments=segments,
        budgets=Budgets(device_bytes=device, host_bytes=host),
        wishes=Wishes(
            overlap_update=overlap, retain_gradients=not overlap, chunk_numel=1 << 17, sub_group_numel=1 << 17
        ),
        links=BandwidthModel([disk]),
        times=ComputeTimes.proportional(
            segments, forward_s=passes_s / 3, backward_s=passes_s * 2 / 3, adam_elements_per_s=2e9
        ),
    )


def every_placement(asked: PlacementQuestion, like: Placement) -> list[Placement]:
    """All assignments of homes that fit the budgets, with the update buffers of ``like``; states also by quarters."""
    planner = _Planner(segments=asked.segments, budgets=asked.budgets, wishes=asked.wishes, generations=2)
    staging = planner.staging_bytes(like.sub_group_numel)
    found = []
    for assigned in itertools.product(*(every_home(asked, s) for s in asked.segments)):
        placed = {s.name: home for s, home in zip(asked.segments, assigned, strict=True)}
        needs = planner.needs(placed)
        if planner.fits(needs, 1, staging):
            found.append(planner.placement(needs, like.sub_group_numel, staging, []))
    return found


def every_home(asked: PlacementQuestion, s: SegmentSize) -> list[Home]:
    wishes = asked.wishes
    whole = [
        Home(param=param, state=state)
        for param, state in itertools.product(wishes.param_tiers, wishes.state_tiers)
        if (param, state) != (Tier.NVME, Tier.HOST)  # not offered: its parameters would still be read and written
    ]
    quarters = [
        Home(param=param, state=Tier.NVME, kept=quarter * s.shard_numel // 4, kept_on=memory)
        for param, memory, quarter in itertools.product(wishes.param_tiers[:-1], wishes.state_tiers[:-1], (1, 2, 3))
    ]
    return whole + quarters


# numels, device bytes, host bytes, seconds of both passes, update under the backward pass
CASES = [
    ([MIB] * 3, 3 * MIB, 24 * MIB, 0.02, True),
    ([MIB] * 3, 3 * MIB, 24 * MIB, 0.02, False),
    ([MIB] * 3, 2 * MIB, 22 * MIB, 0.05, False),
    ([MIB] * 3, 4 * MIB, 32 * MIB, 0.005, True),
    ([MIB, 2 * MIB, MIB], 4 * MIB, 30 * MIB, 0.2, False),
    ([MIB] * 3, 6 * MIB, 21 * MIB, 0.5, False),
]
LARGER_CASES = [
    ([MIB] * 4, 2 * MIB, 30 * MIB, 0.05, False),
    ([MIB] * 4, 4 * MIB, 40 * MIB, 0.005, True),
    ([MIB] * 4, 8 * MIB, 28 * MIB, 0.5, False),
]


@pytest.mark.parametrize(
    ("numels", "device", "host", "passes_s", "overlap"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER_CASES)],
)
def test_the_choice_is_within_five_percent_of_the_best_placement_there_is(
    numels: list[int], device: int, host: int, passes_s: float, overlap: bool
) -> None:
    asked = question(numels, device=device, host=host, passes_s=passes_s, overlap=overlap)
    ours = choose(asked)
    everything = every_placement(asked, ours.placement)
    assert len(everything) > 3
    best = min(asked.predict(placement).step_s for placement in everything)
    assert ours.predicted.step_s <= 1.05 * best
    assert ours.placement.device_bytes <= device
    assert ours.placement.host_bytes <= host


def test_memory_goes_to_the_front_of_the_model_whose_update_nothing_is_left_to_hide() -> None:
    """A smaller segment further back would fit as a whole; but its update is hidden by the rest of the backward pass."""
    numels = [2 * MIB, MIB, MIB // 2]
    device, host = 4_404_019, 35 * MIB + 3 * 12 * (1 << 17)
    asked = question(numels, device=device, host=host, passes_s=0.03, overlap=True, read=0.8 * GB)
    ours = choose(asked)
    best = min(asked.predict(placement).step_s for placement in every_placement(asked, ours.placement))
    assert ours.predicted.step_s <= 1.05 * best


def test_states_come_first_where_compute_hides_the_parameters_and_the_update_does_not() -> None:
    asked = question([MIB] * 8, device=4 * MIB, host=60 * MIB, passes_s=0.05, overlap=False)
    ours = choose(asked)
    usual = asked.predict(asked.place())
    assert ours.predicted.step_s < 0.995 * usual.step_s
    in_memory = [sum(home.state is Tier.HOST for home in p.homes.values()) for p in (ours.placement, asked.place())]
    assert in_memory[0] > in_memory[1]
    assert "optimizer states before parameters" in str(explain(ours))


def test_the_usual_order_is_kept_where_it_makes_no_difference() -> None:
    asked = question([MIB] * 4, device=64 * MIB, host=256 * MIB, passes_s=0.1, overlap=False)
    assert choose(asked).placement == asked.place()


def test_an_explanation_says_what_binds_and_what_would_help() -> None:
    asked = question([MIB] * 6, device=4 * MIB, host=30 * MIB, passes_s=0.001, overlap=False)
    said = explain(choose(asked))
    assert said.binding == DISK
    assert said.slack[DISK] < said.slack["compute"]
    gains = {item.change.split(" (")[0]: item.speedup for item in said.alternatives}
    assert gains["disks twice as fast"] > 1.7
    assert gains["half as much host memory again"] > 1.05
    assert gains["a batch twice as large"] > 1.5, "a larger batch costs next to nothing where the disk binds"
    assert json.loads(json.dumps(said.as_dict()))["binding"] == DISK
    assert "the disk binds" in str(said)
    assert sum(said.homes.values()) == 6


def test_a_step_of_nothing_but_latencies_is_not_said_to_be_bound_by_a_link() -> None:
    asked = question([MIB] * 6, device=4 * MIB, host=30 * MIB, passes_s=0.001, overlap=False)
    said = replace(explain(choose(asked)), slack={DISK: 0.97, "compute": 1.0})
    assert "no link binds, the time of single transfers does: the disk is idle 97%; compute is idle 100%" in str(said)


def test_where_compute_binds_a_faster_disk_gives_little() -> None:
    asked = question([MIB] * 4, device=4 * MIB, host=40 * MIB, passes_s=5.0, overlap=True)
    said = explain(choose(asked))
    assert said.binding == "compute"
    gains = {item.change.split(" (")[0]: item.speedup for item in said.alternatives}
    assert gains["disks twice as fast"] < 1.05
    assert gains["a batch twice as large"] < 1.05


def test_pinned_tiers_are_named_as_the_reason() -> None:
    asked = question([MIB] * 2, device=64 * MIB, host=64 * MIB, passes_s=0.1, overlap=False)
    pinned = replace(asked, wishes=replace(asked.wishes, param_tiers=(Tier.NVME,), state_tiers=(Tier.NVME,)))
    assert "parameters on nvme: the configuration says so" in str(explain(choose(pinned)))


def test_parameters_that_stay_whole_in_memory_take_no_window_even_where_compute_is_in_place_nowhere() -> None:
    """As on several ranks at stage 3: the window is sized without them, so a step must not fetch them."""
    asked = question([MIB] * 2, device=8 * MIB, host=30 * MIB, passes_s=0.1, overlap=False)
    kept = replace(asked.segments[0], name="norms", full_numel=64, shard_numel=32, persistent=True)
    asked = replace(
        asked,
        segments=(*asked.segments, kept),
        wishes=replace(asked.wishes, in_place_tiers=(), param_tiers=(Tier.NVME,)),
    )
    ours = choose(asked)
    assert asked.step(ours.placement).groups[0].window_bytes == 2 * MIB
    assert ours.predicted.step_s > 0


def test_updates_through_buffers_go_by_a_rate_of_their_own() -> None:
    asked = question([MIB, MIB], device=64 * MIB, host=64 * MIB, passes_s=1.0, overlap=False)
    asked = replace(asked, times=replace(asked.times, streamed_adam_elements_per_s=0.5e9))
    homes = {"block0": Home(param=Tier.DEVICE, state=Tier.HOST), "block1": Home(param=Tier.NVME, state=Tier.NVME)}
    step = asked.step(asked.placement_at(homes, like=asked.place()))
    seconds = {update.name: sum(part.adam_s for part in update.sub_groups) for update in step.updates}
    assert seconds == {"block0": pytest.approx(MIB / 2e9), "block1": pytest.approx(MIB / 0.5e9)}

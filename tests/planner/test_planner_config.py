"""Configs that the planner writes are read by the engine's own parser, with the same meaning; budgets agree
with it."""

from pathlib import Path
from typing import Any

import pytest

from lamina.engine.config import EngineConfig
from lamina.engine.planner import (
    Buffers,
    Case,
    Question,
    Workload,
    all_placements,
    emit_config,
    footprint,
    machine_preset,
    model_preset,
)
from lamina.engine.planner.emit_config import budget_bytes, outside_budget
from lamina.engine.planner.options import Option, option
from lamina.engine.planner.placement import DEVICE, HOST, NVME, Placement
from lamina.tiers import PlacementError, place
from lamina.tiers.placement.homes import Budgets, SegmentSize, Wishes
from lamina.tiers.tier import Tier

LOADS = (
    Workload(dtype="bf16", micro_batch=2, sequence=128),
    Workload(dtype="fp16", accumulation=3, sequence=128),
    Workload(dtype="fp32", checkpoint_interval=0, sequence=128, barrier=False),
)


def chosen(where: Placement, load: Workload, *, devices: int = 1, machine: str = "cpu-16") -> Option:
    question = Question(
        model=model_preset("gpt2"),
        load=load,
        machine=machine_preset(machine).with_changes({"devices": devices}),
        buffers=Buffers(),
    )
    return option(question, where)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.dtype)
@pytest.mark.parametrize("where", list(all_placements()), ids=lambda where: where.label)
def test_every_placement_gives_a_config_that_loads(where: Placement, load: Workload, tmp_path: Path) -> None:
    item = chosen(where, load, devices=2)
    config = EngineConfig.load(emit_config(item, nvme_path=str(tmp_path)), world_size=2)
    assert config.train_batch_size == load.micro_batch * load.accumulation * 2
    assert config.compute_dtype == load.dtype
    assert config.gradient_clipping == (1.0 if load.barrier else 0.0)
    assert config.zero_optimization.stage == where.stage
    assert config.grad_accum_dtype == {2: load.dtype, 4: "fp32"}[load.grad_bytes]
    assert config.tiers.generations == 2
    assert config.activations == (where.activations if load.checkpoint_interval else "keep")
    names = {"none": DEVICE, "cpu": HOST, "nvme": NVME}
    assert names[config.zero_optimization.offload_param.device] == where.param
    assert names[config.zero_optimization.offload_optimizer.device] == where.optimizer
    placement: Any = config.tiers.placement
    assert placement["param"] == where.param
    assert placement["exp_avg"] == where.optimizer
    assert placement.get("grad", HOST) == item.case.place.grad
    assert (config.tiers.device_bytes or 0) == budget_bytes(item, DEVICE)
    assert (config.tiers.host_bytes or 0) == budget_bytes(item, HOST)
    assert [str(entry.path) for entry in config.nvme_paths] == ([str(tmp_path)] if NVME in where.label else [])


def segments_of(case: Case) -> list[SegmentSize]:
    part, load = case.slice, case.load
    return [
        SegmentSize(
            name=f"group{index}",
            group=index,
            full_numel=shard * part.ranks,
            shard_numel=shard,
            param_itemsize=load.itemsize,
            state_itemsizes=tuple(size for plane, size in case.planes.items() if plane != "param"),
            grad_itemsize=load.grad_bytes,
            block=index > 0,
        )
        for index, shard in enumerate(part.shards)
    ]


def placed(case: Case, budgets: Budgets) -> Any:
    """What the tier layer's own arithmetic says of the same homes."""
    param, state = Tier(case.place.param), Tier(case.place.optimizer)
    early = not case.load.barrier and case.load.dtype != "fp16"
    sums = case.load.accumulation > 1
    wishes = Wishes(
        param_tiers=(param,),
        state_tiers=(state,),
        sub_group_numel=case.buffers.sub_group,
        overlap_update=early,
        retain_gradients=sums,
    )
    return place(segments_of(case), budgets, wishes)


ON_ONE_RANK = [where for where in all_placements(stages=(3,)) if where.optimizer != DEVICE and where.grad == HOST]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.dtype)
@pytest.mark.parametrize("where", ON_ONE_RANK, ids=lambda where: where.label)
def test_arena_bytes_agree_with_the_tier_layer(where: Placement, load: Workload) -> None:
    item = chosen(where, load)
    # The tier layer widens its window as far as the device budget goes: it is given what the planner counts with.
    budgets = Budgets(device_bytes=budget_bytes(item, DEVICE) or None, host_bytes=budget_bytes(item, HOST))
    theirs = placed(item.case, budgets)
    assert item.held.arena_peak(DEVICE) == pytest.approx(theirs.device_bytes, rel=0.03, abs=1 << 16)
    assert item.held.peak(NVME) == pytest.approx(theirs.nvme_bytes, rel=0.03)
    # Update buffers exist beside the gradients there; ours are counted in the phase that has both.
    assert item.held.arena_peak(HOST) == pytest.approx(theirs.host_bytes, rel=0.03)


@pytest.mark.parametrize("where", ON_ONE_RANK, ids=lambda where: where.label)
def test_emitted_budgets_are_enough_and_hardly_more(where: Placement) -> None:
    item = chosen(where, LOADS[0])
    device, host = budget_bytes(item, DEVICE), budget_bytes(item, HOST)
    assert placed(item.case, Budgets(device_bytes=device, host_bytes=host)).homes
    for less in (Budgets(device_bytes=device // 4), Budgets(host_bytes=host // 2)):
        nothing_there = (less.device_bytes == 0) or (less.host_bytes == 0)
        if nothing_there or (where.param == NVME and less.device_bytes is not None):
            continue  # a smaller window is slower, not impossible
        if where.optimizer == NVME and where.param != HOST and less.host_bytes is not None:
            assert placed(item.case, less).scratch_bytes, "gradients beyond it go to a file: slower, not impossible"
            continue
        with pytest.raises(PlacementError):
            placed(item.case, less)


def test_what_the_budget_leaves_out_is_named() -> None:
    item = chosen(Placement(stage=3, param=NVME, optimizer=NVME), LOADS[0], machine="rtx4090")
    left_out = outside_budget(item, DEVICE)
    phase = item.held.peak_phase(DEVICE)
    assert sum(left_out.values()) + item.held.arena_peak(DEVICE) == item.held.peak(DEVICE)
    assert set(left_out) < set(item.held.of(DEVICE, phase))


def test_a_tenth_of_padding_covers_pages() -> None:
    # Every block starts on a page: the budget's slack is that of its blocks and no more.
    item = chosen(Placement(stage=3, optimizer=HOST), LOADS[0])
    need = footprint(item.case).arena_peak(HOST)
    blocks = len(item.case.slice.groups) * (len(item.case.planes) + 2)
    assert need <= budget_bytes(item, HOST) <= need + (blocks + 1) * 4096

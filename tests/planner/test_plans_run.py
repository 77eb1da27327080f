"""What a plan says is what the engine does: plans that fit run within their budgets, and one page less is refused with
the planner's own figure."""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.bench.training.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine import initialize
from lamina.engine.planner import (
    Buffers,
    Option,
    Placement,
    Question,
    Workload,
    all_placements,
    emit_config,
    shape_from_module,
    this_machine,
)
from lamina.engine.planner.emit_config import budget_bytes
from lamina.engine.planner.options import option
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.state_bytes import CHUNK_ELEMENTS, as_dtype
from lamina.tiers import PlacementError
from lamina.tiers.errors import SpaceError

RATES = {"half_flops": 1e11, "fp32_flops": 1e11, "host_bandwidth": 1e10}
RATES |= {"nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 1e9}
FEW, MANY = range(4), range(4, 24)


@dataclass(frozen=True)
class Sample:
    """A random small model, load and placement."""

    shape: GPTShape
    load: Workload
    place: Placement
    lookahead: int


def sample(seed: int) -> Sample:
    draw = random.Random(seed)
    shape = GPTShape(layers=draw.randint(3, 6), dim=64 * draw.randint(2, 4), heads=4, seq=64, tied=draw.random() < 0.3)
    activations = draw.choice([None, DEVICE, HOST, NVME])
    load = Workload(
        micro_batch=draw.randint(1, 3),
        sequence=64,
        accumulation=draw.choice([1, 1, 2]),
        dtype=draw.choice(["bf16", "fp32"]),
        checkpoint_interval=0 if activations is None else 1,
        barrier=draw.random() < 0.7,
    )
    places = list(all_placements(stages=(1, 2, 3), activations=activations or DEVICE))
    return Sample(shape=shape, load=load, place=draw.choice(places), lookahead=draw.randint(1, 3))


def planned(made: Sample, folder: Path, *, buffers: Buffers | None = None, device_bytes: int = 0) -> Option:
    with torch.device("meta"):
        model = shape_from_module(GPT(made.shape), name="gpt", heads=made.shape.heads)
    machine = replace(this_machine(rates=RATES, nvme_path=folder), device_bytes=device_bytes)
    own = Buffers(lookahead=made.lookahead) if buffers is None else buffers
    return option(Question(model=model, load=made.load, machine=machine, buffers=own), made.place)


def run(made: Sample, config: dict[str, Any]) -> dict[str, int]:
    """Two steps; the arenas' own peaks."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (made.load.micro_batch, made.load.sequence))
    engine, _, _, _ = initialize(model=GPT(made.shape), config=config)
    with engine:
        for _ in range(2 * made.load.accumulation):
            engine.backward(engine(tokens, tokens))
            engine.step()
        return dict(engine.metrics().peak_bytes)


def check_fits(seed: int, folder: Path) -> None:
    made = sample(seed)
    item = planned(made, folder)
    assert item.fits, item.verdict
    config = emit_config(item, nvme_path=str(folder))
    peaks = run(made, config)
    predicted = {tier: item.held.arena_peak(tier) for tier in (DEVICE, HOST)}
    for tier, most in predicted.items():
        used, loose = peaks.get(tier, 0), item.case.place.grad == NVME
        assert used <= budget_bytes(item, tier), (made, tier)
        if not loose:  # gradients need not go to a file that memory has room for
            assert used == pytest.approx(most, rel=0.03), (made, tier)
    on_files = peaks.get(NVME, 0)
    assert on_files <= sum(entry["bytes"] for entry in config["tiers"].get("nvme", []))
    # A file for activation checkpoints grows by more than it needs.
    if item.case.place.grad == HOST and item.case.place.activations != NVME:
        assert on_files == item.held.peak(NVME), made


def check_refused(seed: int, folder: Path) -> None:
    """A hundredth less than the least that works is refused on every tier that cannot give way."""
    made = sample(seed)
    # The least: one group at a time, the smallest update buffers.
    least = Buffers(lookahead=0, sub_group=CHUNK_ELEMENTS)
    item = planned(made, folder, buffers=least)
    config = emit_config(item, nvme_path=str(folder))
    place = item.case.place
    for tier in (DEVICE, HOST):
        need = item.held.arena_peak(tier)
        # Groups are cut finer where a window is short, gradients go to a file: slower, not impossible.
        gives_way = item.case.needs.streamed() if tier == DEVICE else place.optimizer == NVME
        if not need or gives_way:
            continue
        less = need * 99 // 100
        if tier == DEVICE:
            refused = planned(made, folder, buffers=least, device_bytes=less)
            assert not refused.fits
            assert refused.verdict.overfull is not None
            assert refused.verdict.overfull.need == need
            assert planned(made, folder, buffers=least, device_bytes=need).fits
        with pytest.raises(PlacementError) as refusal:
            run(made, {**config, "tiers": {**config["tiers"], f"{tier}_bytes": less}})
        told = re.search(rf"{tier}_bytes is {less:,}, but at least ([\d,]+) are needed", str(refusal.value))
        assert told is not None, refusal.value
        assert int(told[1].replace(",", "")) == pytest.approx(need, rel=0.01), (made, tier)
    # Those that do give way still hold one parameter, or the planes of one in each update buffer.
    largest = item.case.model.params.largest_param
    for tier, moves, least_bytes in (
        (DEVICE, bool(item.case.needs.streamed()), largest * made.load.itemsize),
        (HOST, place.optimizer == NVME, 3 * sum(item.case.planes.values()) * min(largest, CHUNK_ELEMENTS)),
    ):
        if moves:
            assert least_bytes <= item.held.arena_peak(tier)
            with pytest.raises(PlacementError, match=f"with {largest:,} elements"):
                run(made, {**config, "tiers": {**config["tiers"], f"{tier}_bytes": least_bytes * 99 // 100}})


@pytest.mark.parametrize("seed", FEW)
def test_plan_that_fits_runs_within_its_budget(seed: int, tmp_path: Path) -> None:
    check_fits(seed, tmp_path)


@pytest.mark.parametrize("seed", FEW)
def test_plan_that_does_not_fit_is_refused_with_the_same_figure(seed: int, tmp_path: Path) -> None:
    check_refused(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_twenty_plans_that_fit_run_within_their_budgets(seed: int, tmp_path: Path) -> None:
    check_fits(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_twenty_plans_that_do_not_fit_are_refused_with_the_same_figures(seed: int, tmp_path: Path) -> None:
    check_refused(seed, tmp_path)


def disk_bytes(folder: Path) -> int:
    """What `du` shows."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


ON_DISK = [
    Placement(stage=3, param=NVME, optimizer=NVME),
    Placement(stage=3, optimizer=NVME),
    Placement(stage=1, optimizer=NVME),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("place", ON_DISK, ids=lambda place: place.label)
def test_disk_takes_what_was_planned_and_too_little_is_refused(place: Placement, dtype: str, tmp_path: Path) -> None:
    shape = GPTShape(layers=4, dim=256, heads=4, seq=64)
    load = Workload(micro_batch=1, sequence=64, dtype=as_dtype(dtype), checkpoint_interval=0)
    made = Sample(shape=shape, load=load, place=place, lookahead=2)
    item = planned(made, tmp_path)
    config = emit_config(item, nvme_path=str(tmp_path))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    engine, _, _, _ = initialize(model=GPT(shape), config=config)
    with engine:
        for _ in range(3):
            engine.backward(engine(tokens, tokens))
            engine.step()
            # Checksums and manifests are beside the planes.
            assert disk_bytes(tmp_path) == pytest.approx(item.held.peak(NVME), rel=0.05)
        before = disk_bytes(tmp_path)
        engine.save_checkpoint(tmp_path / "saved")
        engine.backward(engine(tokens, tokens))
        engine.step()
        assert disk_bytes(tmp_path) - before == pytest.approx(item.held.checkpoint_bytes, rel=0.05)
    (path,) = config["tiers"]["nvme"]
    path["bytes"] = item.held.peak(NVME) * 9 // 10
    with pytest.raises(SpaceError, match=f"room for {path['bytes']:,}") as refusal:
        initialize(model=GPT(shape), config=config)
    told = re.search(r"needs ([\d,]+) bytes", str(refusal.value))
    assert told is not None
    assert int(told[1].replace(",", "")) == pytest.approx(item.held.peak(NVME), rel=0.01)

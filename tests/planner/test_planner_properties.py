"""What must hold for every plan, on random questions; and byte counts against slow plain sums."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.engine.planner import (
    Buffers,
    Case,
    Kind,
    Machine,
    ModelShape,
    Phase,
    Placement,
    PlanError,
    Question,
    Workload,
    all_placements,
    fit,
    footprint,
    machine_preset,
    plan,
    step_time,
)
from lamina.engine.planner.channel_bytes import Channel, channel_bytes
from lamina.engine.planner.conventions import efficiency
from lamina.engine.planner.model_shape import LoraShape
from lamina.engine.planner.rank_slice import rank_slice
from lamina.engine.planner.state_bytes import (
    flat_numel,
    generation_bytes,
    grad_bytes_per_param,
    nvme_bytes,
    optimizer_bytes_per_param,
    plane_bytes_per_param,
    shard_numel,
    staged_bytes_per_param,
    update_read_bytes_per_param,
    update_write_bytes_per_param,
)
from lamina.tiers.nvme.layout import Layout
from lamina.tiers.tier import Plane, PlaneSpec, ShardSpec
from lamina.zero.adam.dtypes import STATE_PLANES
from lamina.zero.groups.partition import FlatLayout

GIB = 1 << 30
dtypes = st.sampled_from(["bf16", "fp16", "fp32"])
models = st.builds(
    lambda layers, heads, width, vocab, gated, tied: ModelShape(
        name="m", layers=layers, hidden=heads * width, heads=heads, vocab=vocab, gated=gated, tied=tied
    ),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from([16, 64, 128]),
    st.integers(2, 5000),
    st.booleans(),
    st.booleans(),
)
loads = st.builds(
    Workload,
    micro_batch=st.integers(1, 8),
    sequence=st.sampled_from([16, 128, 1000]),
    accumulation=st.integers(1, 3),
    dtype=dtypes,
    checkpoint_interval=st.integers(0, 3),
    attention=st.sampled_from(["flash", "plain"]),
    barrier=st.booleans(),
)
places = st.sampled_from([*all_placements(), *all_placements(activations="host")])


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    base = machine_preset(draw(st.sampled_from(["dgx2", "a100-40", "rtx4090", "cpu-16"])))
    return replace(
        base,
        devices_per_host=draw(st.sampled_from([1, 2, 3, 8])),
        hosts=draw(st.integers(1, 2)),
        host_bytes=draw(st.integers(1 * GIB, 64 * GIB)),
        device_bytes=draw(st.integers(1 * GIB, 16 * GIB)),
        nvme_bytes=draw(st.integers(0, 64 * GIB)),
        host_reserve_bytes=0,
    )


cases = st.builds(Case, model=models, load=loads, place=places, machine=machines())


@pytest.mark.parametrize(
    ("dtype", "total", "read", "write"), [("bf16", 12, 12, 12), ("fp16", 14, 12, 14), ("fp32", 12, 12, 12)]
)
def test_planes_of_adam_are_the_designed_ones(dtype: str, total: int, read: int, write: int) -> None:
    assert sum(plane_bytes_per_param(dtype).values()) == total
    assert update_read_bytes_per_param(dtype) == read
    assert update_write_bytes_per_param(dtype) == write
    assert optimizer_bytes_per_param(dtype) == total - plane_bytes_per_param(dtype)["param"]


def test_planes_are_those_that_training_keeps() -> None:
    for torch_dtype, planes in STATE_PLANES.items():
        name = str(torch_dtype)
        assert plane_bytes_per_param(name) == {spec.plane.value: spec.itemsize for spec in planes}


@pytest.mark.parametrize(("optimizer", "moments"), [("adam", 8), ("lion", 4), ("momentum", 4), ("sgd", 0)])
def test_other_optimizers_keep_fewer_moments(optimizer: str, moments: int) -> None:
    assert optimizer_bytes_per_param("fp32", optimizer) == moments


def test_gradients_are_raised_once_they_are_summed() -> None:
    assert [grad_bytes_per_param("bf16", n) for n in (1, 2)] == [2, 4]
    assert [grad_bytes_per_param("fp32", n) for n in (1, 2)] == [4, 4]
    with pytest.raises(PlanError, match="at least 1"):
        grad_bytes_per_param("bf16", 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plane_bytes_per_param("int8"), "int8"),
        (lambda: plane_bytes_per_param("bf16", "adafactor"), "adafactor"),
        (lambda: shard_numel(10, 0), "ranks: 0"),
        (lambda: nvme_bytes([1], {"param": 2}, generations=0), "generations: 0"),
        (lambda: staged_bytes_per_param(4, 1, param=2, grad=2, optimizer=12), "stage: 4"),
        (lambda: staged_bytes_per_param(3, 0, param=2, grad=2, optimizer=12), "ranks: 0"),
        (lambda: Workload(micro_batch=0), "micro_batch: 0"),
        (lambda: Workload(dtype="fp8"), "fp8"),  # type: ignore[arg-type]
        (lambda: Placement(stage=2, param="host", optimizer="host"), "need stage 3"),
        (lambda: Placement(stage=0, optimizer="host"), "needs stage 1"),
        (lambda: Placement(stage=3, param="nvme", optimizer="host"), "host with parameters on nvme"),
        (lambda: Placement(stage=3, optimizer="host", grad="device"), "the update runs in one place"),
        (lambda: Buffers(generations=0), "generations is 0"),
        (lambda: Buffers(max_live=-1), "max_live is -1"),
    ],
)
def test_impossible_input_names_the_thing_and_its_value(call: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()  # type: ignore[operator]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9))
def test_flat_layout_is_that_of_the_partition(numels: list[int], ranks: int) -> None:
    real = FlatLayout.of([(str(i), (n,)) for i, n in enumerate(numels)], ranks)
    assert flat_numel(numels, ranks) == real.numel
    assert flat_numel(numels, ranks) // ranks == real.shard_numel


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8), dtypes)
def test_generation_file_is_that_of_the_store(numels: list[int], dtype: str) -> None:
    planes = plane_bytes_per_param(dtype)
    specs = tuple(PlaneSpec(plane=Plane(name), itemsize=size) for name, size in planes.items())
    shards = [ShardSpec(name=str(i), numel=n, planes=specs) for i, n in enumerate(numels)]
    layout = Layout(shards)
    ours = generation_bytes(numels, planes)
    # The file also holds a checksum for each chunk, behind the planes.
    assert layout.sums_offsets == (ours,)
    assert sum(layout.file_bytes) - ours <= 4096 * (1 + layout.num_chunks // 1024)


@settings(max_examples=60, deadline=None)
@given(models, loads, places, st.integers(2, 6))
def test_more_ranks_never_need_more_bytes_per_rank(
    model: ModelShape, load: Workload, place: Placement, ranks: int
) -> None:
    # From two ranks on: a single one has nothing to gather and needs no window for it.
    def held(count: int) -> dict[str, int]:
        machine = replace(machine_preset("dgx2"), devices_per_host=count)
        shape = footprint(Case(model=model, load=load, place=place, machine=machine))
        return {tier: shape.peak(tier) for tier in ("device", "host", "nvme")}

    few, many = held(ranks), held(2 * ranks)
    # Shards are equal and whole pages: a group is padded by up to 32 elements a rank, in its home and in its bucket.
    padding = (model.layers + 1) * 2 * (32 * 2 * ranks * load.itemsize + 4096)
    assert all(many[tier] <= few[tier] + padding for tier in few)


@settings(max_examples=40, deadline=None)
@given(models, dtypes, st.integers(1, 64))
def test_state_per_rank_never_grows_with_ranks_or_stage(model: ModelShape, dtype: str, ranks: int) -> None:
    states = {Kind.PARAMETERS, Kind.MASTER, Kind.MOMENTS}

    def held(stage: int, count: int) -> int:
        machine = replace(machine_preset("dgx2"), devices_per_host=count)
        case = Case(model=model, load=Workload(dtype=dtype), place=Placement(stage=stage), machine=machine)
        kinds = footprint(case).of("device", Phase.INIT)
        return sum(nbytes for kind, nbytes in kinds.items() if kind in states)

    by_stage = [held(stage, ranks) for stage in (0, 1, 2, 3)]
    slack = (32 * 14 + 4 * 4096) * (model.layers + 1)  # padding and the last page of every plane of every group
    assert all(later <= earlier + slack for earlier, later in pairwise(by_stage))
    assert all(held(stage, ranks + 1) <= now + slack for stage, now in enumerate(by_stage))
    # Stage 3 against a plain sum over parameters.
    per_param = sum(plane_bytes_per_param(dtype).values())
    assert by_stage[3] * ranks == pytest.approx(per_param * model.total_params, abs=slack * ranks)


@settings(max_examples=25, deadline=None)
@given(models, loads, machines(), st.sampled_from(["host_bytes", "device_bytes", "nvme_bytes"]))
def test_more_memory_never_gives_a_slower_plan(model: ModelShape, load: Workload, machine: Machine, field: str) -> None:
    question = Question(model=model, load=load, machine=machine)
    more = replace(machine, **{field: 2 * getattr(machine, field) + GIB})
    before, after = (
        plan(replace(question, machine=each), with_advice=False, with_largest=False).best for each in (machine, more)
    )
    if before is not None:
        assert after is not None
        assert after.time.tokens_per_s >= before.time.tokens_per_s


@settings(max_examples=80, deadline=None)
@given(cases)
def test_verdict_follows_from_the_items(case: Case) -> None:
    held = footprint(case)
    verdict = fit(case, held)
    for use in verdict.tiers:
        assert use.need == sum(use.by_kind.values())
        if use.offender is not None:
            assert use.offender[1] == max(use.by_kind.values())
    # A slow plain sum, phase by phase.
    for tier in ("device", "host", "nvme"):
        sums = [sum(item.nbytes for item in held.items if item.tier == tier and p in item.phases) for p in Phase]
        assert held.peak(tier) == max(sums)
    assert verdict.fits == all(use.need <= use.limit for use in verdict.tiers)
    assert verdict.fits or verdict.overfull is not None
    assert (not verdict.causes) if verdict.fits else True
    assert all(cause.saves > 0 for cause in verdict.causes)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_step_is_never_below_its_bound_and_channels_never_above_the_step(case: Case) -> None:
    time = step_time(case)
    assert time.lower_bound_s <= time.step_s * (1 + 1e-9)
    busiest = max(*time.passes.values(), *(time.update.values() or [0.0]))
    assert busiest <= time.step_s * (1 + 1e-9)
    assert 0 < time.mfu < 1
    assert time.binding in {**time.passes, **time.update}


@settings(max_examples=60, deadline=None)
@given(cases)
def test_efficiency_is_that_of_arithmetic_intensity(case: Case) -> None:
    # Equation 6 with operations per byte of the link, its bandwidth and the rate that kernels reach.
    moved, time = channel_bytes(case), step_time(case)
    if not moved.passes[Channel.TO_DEVICE]:
        return
    machine = case.machine
    rate = machine.peak_flops(case.load.itemsize) * machine.achievable
    flops = time.passes[Channel.COMPUTE] * rate
    bandwidth = machine.device_rate_from("host", active=machine.devices_per_host)
    expected = efficiency(flops / moved.passes[Channel.TO_DEVICE], bandwidth, rate)
    assert time.efficiency[Channel.TO_DEVICE] == pytest.approx(expected, rel=1e-9)


def test_update_through_nvme_moves_the_designed_bytes() -> None:
    model = ModelShape(name="m", layers=2, hidden=64, heads=2)
    for dtype, read, write in (("bf16", 12, 12), ("fp16", 12, 14), ("fp32", 12, 12)):
        case = Case(
            model=model,
            load=Workload(dtype=dtype),
            place=Placement(stage=3, param="nvme", optimizer="nvme"),
            machine=machine_preset("rtx4090"),
        )
        update = channel_bytes(case).update
        assert update[Channel.NVME_READ] == read * model.total_params
        assert update[Channel.NVME_WRITE] == write * model.total_params


def test_one_rank_moves_nothing_between_ranks() -> None:
    for place in all_placements():
        case = Case(
            model=ModelShape(name="m", layers=2, hidden=64, heads=2),
            load=Workload(),
            place=place,
            machine=machine_preset("rtx4090"),
        )
        assert channel_bytes(case).total(Channel.COLLECTIVE) == 0


def test_collective_bytes_are_those_of_rings() -> None:
    model = ModelShape(name="m", layers=2, hidden=64, heads=2)
    machine = replace(machine_preset("dgx2"), devices_per_host=4)

    def moved(stage: int, accumulation: int) -> float:
        load = Workload(accumulation=accumulation)
        case = Case(model=model, load=load, place=Placement(stage=stage), machine=machine)
        return channel_bytes(case).total(Channel.COLLECTIVE) / (2 * 3 / 4)

    total = model.total_params
    outside = rank_slice(model, Placement(stage=3), 4).outside
    for steps in (1, 3):
        assert moved(0, steps) == 2 * total  # all-reduce once
        assert moved(1, steps) == 2 * total  # reduce-scatter and all-gather once
        assert moved(2, steps) == (steps + 1) * total
        assert moved(3, steps) == steps * (3 * total - outside)  # forward, backward, reduce; what is outside: once


def test_lora_state_is_that_of_the_adapters() -> None:
    model = ModelShape(name="m", layers=4, hidden=256, heads=4, lora=LoraShape(rank=4))
    place = Placement(stage=3, param="nvme", optimizer="nvme")
    case = Case(model=model, load=Workload(), place=place, machine=machine_preset("rtx4090"))
    held = footprint(case).of("nvme", Phase.INIT)
    adapters = 4 * 4 * (256 + 256) * 4
    assert model.trainable_params == adapters
    assert held[Kind.MOMENTS] == pytest.approx(2 * 8 * adapters, abs=4 * 4 * 4096)
    frozen = model.total_params - adapters
    assert held[Kind.PARAMETERS] == pytest.approx(2 * frozen + 2 * 2 * adapters, abs=3 * 6 * 4096)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Placement(stage=3, tensor=3), "8 ranks are no multiple of tensor 3"),
        (Placement(stage=3, pipeline=4), "pipeline 4 exceeds the 2 blocks"),
        (Placement(stage=3, tensor=8), "tensor 8 exceeds the 2 heads"),
    ],
)
def test_impossible_splits_are_named(place: Placement, message: str) -> None:
    model = ModelShape(name="m", layers=2, hidden=64, heads=2)
    machine = replace(machine_preset("dgx2"), devices_per_host=8)
    with pytest.raises(PlanError, match=message):
        footprint(Case(model=model, load=Workload(), place=place, machine=machine))


def test_tensor_and_pipeline_split_what_a_rank_holds() -> None:
    model = ModelShape(name="m", layers=8, hidden=512, heads=8, vocab=1000)
    whole = rank_slice(model, Placement(stage=3), 8)
    split = rank_slice(model, Placement(stage=3, tensor=2, pipeline=2), 8)
    assert (whole.ranks, split.ranks) == (8, 2)
    assert split.layers == 4
    assert split.groups[1] == -(-model.block_params // 2)

"""Published figures, to the digits that are printed. The figures stand here as their sources print them."""

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest

from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.case import Case
from lamina.engine.planner.conventions import (
    bandwidth_for,
    deepspeed_zero2,
    deepspeed_zero3,
    efficiency,
    infinity_intensity,
    infinity_memory,
    printed,
    printed_significant,
    zero_paper_gb,
)
from lamina.engine.planner.fit import fit
from lamina.engine.planner.largest import largest_depth
from lamina.engine.planner.machine_presets import cluster_memory_tb, machine_preset
from lamina.engine.planner.model_presets import model_preset
from lamina.engine.planner.model_shape import ModelShape
from lamina.engine.planner.pipeline_bubble import bubble_fraction
from lamina.engine.planner.placement import Placement
from lamina.engine.planner.quantity import GB, GIB
from lamina.engine.planner.wear import drive_wear
from lamina.engine.planner.workload import Workload

RANKS = (1, 4, 16, 64, 256, 1024)
ZERO_TABLE = {
    # params: one row of stages 1, 2, 3 for each number of ranks
    7.5e9: (
        ("120", "120", "120"),
        ("52.5", "41.3", "30"),
        ("35.6", "21.6", "7.5"),
        ("31.4", "16.6", "1.88"),
        ("30.4", "15.4", "0.47"),
        ("30.1", "15.1", "0.12"),
    ),
    128e9: (
        ("2048", "2048", "2048"),
        ("896", "704", "512"),
        ("608", "368", "128"),
        ("536", "284", "32"),
        ("518", "263", "8"),
        ("513", "257", "2"),
    ),
    1e12: (
        ("16000", "16000", "16000"),
        ("7000", "5500", "4000"),
        ("4750", "2875", "1000"),
        ("4187", "2218", "250"),
        ("4046", "2054", "62.5"),
        ("4011", "2013", "15.6"),
    ),
}


def digits(text: str) -> int:
    return len(text.partition(".")[2])


@pytest.mark.parametrize("params", ZERO_TABLE)
def test_zero_table_of_model_states(params: float) -> None:
    for ranks, row in zip(RANKS, ZERO_TABLE[params], strict=True):
        for stage, text in zip((1, 2, 3), row, strict=True):
            ours = zero_paper_gb(params, stage, ranks)
            # The source cuts integers off and rounds what it prints with decimals.
            assert printed(ours, digits(text), truncate=digits(text) == 0) == Decimal(text), (stage, ranks)


def test_stage_zero_holds_sixteen_bytes_at_any_rank_count() -> None:
    for params, rows in ZERO_TABLE.items():
        for ranks in RANKS:
            assert zero_paper_gb(params, 0, ranks) == float(rows[0][0])


INFINITY_TABLE = (
    # params T, layers, hidden, heads, states TiB, activations TiB, checkpoints TiB, MSWM GiB, AWM GiB
    ("0.1", 80, 10240, 128, "1.83", "2.03", "0.05", "1.5625", "1.63"),
    ("0.5", 100, 20480, 160, "9.16", "3.91", "0.12", "6.25", "2.5"),
    ("1.01", 128, 25600, 256, "18.31", "7.13", "0.2", "9.77", "3.56"),
    ("10.05", 195, 65536, 512, "182.81", "24.38", "0.76", "64.0", "8.0"),
    ("101.47", 315, 163840, 1024, "1845.7", "88.59", "3.08", "400.0", "18.0"),
)


@pytest.mark.parametrize("row", INFINITY_TABLE, ids=lambda row: row[0])
def test_infinity_memory_requirements(row: tuple[str, int, int, int, str, str, str, str, str]) -> None:
    ours = infinity_memory(layers=row[1], hidden=row[2], heads=row[3])
    figures = (
        (ours.params / 1e12, row[0]),
        (ours.states_tib, row[4]),
        (ours.activations_tib, row[5]),
        (ours.checkpoints_tib, row[6]),
        (ours.mswm_gib, row[7]),
        (ours.awm_gib, row[8]),
    )
    for figure, text in figures:
        assert printed(figure, digits(text)) == Decimal(text)


@pytest.mark.parametrize(
    ("channel", "batch", "hidden", "share", "text", "significant"),
    [
        ("parameters", 1, 0, 0.5, "68.4", 3),
        ("optimizer", 1, 0, 0.5, "273", 3),
        ("optimizer", 2, 0, 0.9, "1230", 3),
        ("activation_checkpoints", 1, 2048, 0.5, "1.42", 3),
        ("activation_checkpoints", 1, 8192, 0.5, "0.36", 2),
    ],
)
def test_infinity_bandwidth_requirements(
    channel: str, batch: int, hidden: int, share: float, text: str, significant: int
) -> None:
    intensity = infinity_intensity(channel, batch=batch, sequence=1024, hidden=hidden)
    needed = bandwidth_for(intensity, share, 70e12)
    assert printed_significant(needed / GB, significant) == Decimal(text)
    assert efficiency(intensity, needed, 70e12) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize(
    ("devices", "row"),
    [
        (1, (0.032, 1.5, 28)),
        (16, (0.5, 1.5, 28)),
        (64, (2, 6, 112)),
        (256, (8, 24, 448)),
        (1024, (32, 96, 1792)),
        (1536, (48, 144, 2688)),
    ],
)
def test_cluster_memory(devices: int, row: tuple[float, float, float]) -> None:
    assert cluster_memory_tb(machine_preset("dgx2"), devices) == row


def test_bandwidth_of_one_device_alone_and_of_sixteen() -> None:
    machine = machine_preset("dgx2")
    assert machine.device_rate_from("host", active=16) == 3.0 * GB
    assert machine.device_rate_from("nvme", active=16) == 1.6 * GB
    assert machine.device_rate_from("host", active=1) == 12 * GB
    assert machine.device_rate_from("nvme", active=1) == 12 * GB


@pytest.mark.parametrize(
    ("param", "optimizer", "zero_init", "host", "device"),
    [
        (True, True, True, "71.69", "0.12"),
        (True, True, False, "127.45", "0.12"),
        (False, True, True, "63.72", "0.78"),
        (False, True, False, "127.45", "0.78"),
        (False, False, True, "1.43", "6.09"),
        (False, False, False, "127.45", "6.09"),
    ],
)
def test_deepspeed_estimator(param: bool, optimizer: bool, zero_init: bool, host: str, device: str) -> None:
    ours = deepspeed_zero3(
        params=2_851_000_000,
        largest_layer=32_000_000,
        devices_per_host=8,
        offload_param=param,
        offload_optimizer=optimizer,
        zero_init=zero_init,
    )
    assert printed(ours.host_bytes / GIB, 2) == Decimal(host)
    assert printed(ours.device_bytes / GIB, 2) == Decimal(device)


def test_deepspeed_zero2_estimator_by_hand() -> None:
    # 1e9 parameters, 4 devices: 2 bytes stay with offload, 4 + 16 / 4 without; 16 bytes of host a parameter.
    offloaded = deepspeed_zero2(params=10**9, devices_per_host=4, offload_optimizer=True)
    assert (offloaded.device_bytes, offloaded.host_bytes) == (2 * 10**9, 24 * 10**9)
    resident = deepspeed_zero2(params=10**9, devices_per_host=4, offload_optimizer=False)
    assert (resident.device_bytes, resident.host_bytes) == (8 * 10**9, 24 * 10**9)


def test_bubbles() -> None:
    assert bubble_fraction(4, 8, 1) == Fraction(3, 11)
    assert bubble_fraction(8, 32, 2) == Fraction(7, 71)


def test_drive_wear() -> None:
    wear = drive_wear(bytes_per_step=70e9 * 12, rated_tbw=600, step_s=86.4)
    assert wear.bytes_per_step == 0.84e12
    assert wear.steps_to_rated == 714
    assert wear.days_to_rated == pytest.approx(714 * 86.4 / 86400)


def case_13b(*, micro_batch: int, accumulation: int, optimizer: str) -> Case:
    load = Workload(micro_batch=micro_batch, sequence=2048, accumulation=accumulation, dtype="fp16")
    return Case(
        model=model_preset("gpt3-13b"),
        load=load,
        place=Placement(stage=2, optimizer=optimizer),
        machine=machine_preset("a100-40"),
        buffers=Buffers(reduce_bucket=500_000_000),
    )


def test_case_of_13b_before_does_not_fit_and_names_both_causes() -> None:
    verdict = fit(case_13b(micro_batch=128 // 8, accumulation=1, optimizer="device"))
    assert not verdict.fits
    assert verdict.overfull is not None
    assert verdict.overfull.tier == "device"
    first, second = verdict.causes[:2]
    assert first.what == "activations of the micro-batch of 16"
    assert second.what == "optimizer state on the device"


def test_case_of_13b_after_fits_at_about_31_gb() -> None:
    verdict = fit(case_13b(micro_batch=32 // 8 // 4, accumulation=4, optimizer="host"))
    assert verdict.fits
    assert verdict.causes == ()
    (device,) = (use for use in verdict.tiers if use.tier == "device")
    assert 31 * 0.85 <= device.need / GB <= 31 * 1.15


LADDER = {
    # rung: placement, hidden, heads, micro-batch, published billions
    "data parallel": (Placement(stage=0), 1536, 16, 1, 1.4),
    "zero-2": (Placement(stage=2), 4096, 16, 1, 10),
    "zero-offload": (Placement(stage=2, optimizer="host"), 4096, 16, 1, 13),
    "zero-3": (Placement(stage=3), 4096, 32, 1, 20),
    "infinity cpu": (Placement(stage=3, param="host", optimizer="host"), 8192, 32, 1, 70),
    "infinity nvme": (
        Placement(stage=3, param="nvme", optimizer="nvme", grad="nvme", activations="host", tensor=4),
        25600,
        256,
        5,
        1000,
    ),
}


@pytest.mark.parametrize("rung", LADDER)
def test_capacity_ladder_of_one_node(rung: str) -> None:
    place, hidden, heads, micro_batch, published = LADDER[rung]
    case = Case(
        model=ModelShape(name="gpt", layers=1, hidden=hidden, heads=heads, vocab=50257, positions=1024),
        # fp32 sums beside half-precision gradients: the 20 bytes per parameter of the publication.
        load=Workload(micro_batch=micro_batch, sequence=1024, accumulation=2, dtype="fp16", attention="plain"),
        place=place,
        machine=machine_preset("dgx2"),
        # The publication's system ran with its documented default sizes.
        buffers=Buffers(reduce_bucket=500_000_000, max_live=1_000_000_000, half_gradients_kept=True),
    )
    largest = largest_depth(case)
    assert largest is not None
    billions = largest.total_params / 1e9
    assert 0.8 * published <= billions <= 1.2 * published
    # It is the largest: one block more does not fit.
    assert fit(replace(case, model=largest)).fits
    assert not fit(replace(case, model=largest.with_layers(largest.layers + 1))).fits

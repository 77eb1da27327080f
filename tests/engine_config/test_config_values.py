"""Quantities, batch arithmetic and single values, by property and by table."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.config import ConfigError, EngineConfig
from lamina.engine.config.batch import BatchContradiction, resolve_batch
from lamina.engine.config.quantities import BYTE_UNITS, format_bytes, parse_quantity

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@given(number=st.integers(0, 2**20), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_bytes_with_units(number: int, unit: str, space: str) -> None:
    assert parse_quantity(f"{number}{space}{unit}", "bytes") == number * UNITS[unit]
    assert parse_quantity(f"{number}{space}{unit.lower()}", "bytes") == number * UNITS[unit]


@given(number=st.decimals(min_value=0, max_value=10**6, places=3), unit=st.sampled_from(sorted(UNITS)))
def test_fractions_of_a_unit_are_exact_or_refused(number: Decimal, unit: str) -> None:
    exact = number * UNITS[unit]
    if exact == int(exact):
        assert parse_quantity(f"{number}{unit}", "bytes") == int(exact)
    else:
        with pytest.raises(ValueError, match="not whole"):
            parse_quantity(f"{number}{unit}", "bytes")


@given(number=st.integers(-(2**62), 2**62))
def test_whole_numbers_in_every_spelling(number: int) -> None:
    assert parse_quantity(number, "count") == number
    assert parse_quantity(str(number), "count") == number
    if abs(number) < 2**53:
        assert parse_quantity(float(number), "count") == number
        assert parse_quantity(f"{number:.17e}", "count") == number


@given(number=st.integers(0, 2**62))
def test_formatted_bytes_read_back(number: int) -> None:
    assert parse_quantity(format_bytes(number), "bytes") == number


@given(text=st.text(max_size=12))
def test_any_text_is_a_whole_number_or_a_value_error(text: str) -> None:
    for kind in ("count", "bytes"):
        try:
            value = parse_quantity(text, kind)  # type: ignore[arg-type]
        except ValueError:
            continue
        assert isinstance(value, int)
        assert any(character.isdigit() for character in text)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("2G", "bytes", "ambiguous: write 2GB or 2GiB"),
        ("5k", "bytes", "ambiguous: write 5kB or 5KiB"),
        ("5 apples", "bytes", "unit 'apples' is unknown"),
        ("2GB", "count", "without a unit"),
        (1.5, "count", "not whole"),
        (float("inf"), "count", "got inf"),
        (float("nan"), "bytes", "got nan"),
        ("1e99", "count", r"at most 2\^63 - 1"),
        (True, "count", "truth value"),
        (None, "count", "want a whole number"),
        ("", "count", "want a whole number"),
        ("0x10", "count", "want a whole number|without a unit"),
    ],
)
def test_what_is_no_quantity(value: object, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantity(value, kind)
    assert BYTE_UNITS["gib"] == 2**30


SIZE = st.one_of(st.none(), st.integers(-1, 40))


@given(train=SIZE, micro=SIZE, accumulation=SIZE, world=st.integers(1, 4))
def test_e05_batch_sizes_hold_or_are_explained(
    train: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    given_sizes = [train, micro, accumulation]
    # By search: the sizes that agree with what is given. None can be above the largest size that is drawn.
    fitting = [
        (m * a * world, m, a)
        for m in range(1, 41)
        for a in range(1, 41)
        if all(size is None or size == has for size, has in zip(given_sizes, (m * a * world, m, a), strict=True))
    ]
    try:
        sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world)
    except BatchContradiction as error:
        assert not fitting
        text = str(error)
        for name, size in zip(("train_batch_size", "per_gpu", "accumulation_steps"), given_sizes, strict=True):
            assert f"{name} {'not given' if size is None else size}" in text
        assert f"world size {world}" in text
    else:
        assert (sizes.train, sizes.micro, sizes.accumulation) in fitting
        assert sizes.world_size == world


@pytest.mark.parametrize(
    ("given_keys", "world", "wanted"),
    [
        ({}, 2, (2, 1, 1)),
        ({"train_batch_size": 8}, 2, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, 2, (6, 3, 1)),
        ({"gradient_accumulation_steps": 4}, 2, (8, 1, 4)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, 2, (24, 3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 2, (12, 3, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, 1, (3, 3, 1)),
        (dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
         3, (3, 1, 1)),
    ],
)  # fmt: skip
def test_e05_every_subset_derives_the_rest(given_keys: dict[str, Any], world: int, wanted: tuple[int, ...]) -> None:
    config = EngineConfig.load(given_keys, world_size=world)
    assert wanted == (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    assert config.world_size == world


@pytest.mark.parametrize(
    ("given_keys", "world", "message"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            1,
            "train_batch_size 8, train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 1, world size 1 "
            "contradict each other: micro-batch x accumulation x world size is 4, not 8",
        ),
        ({"train_batch_size": 7}, 2, "7 is not a multiple of 2.*works is 6 or 8"),
        ({"train_batch_size": 1}, 4, "1 is not a multiple of 4.*works is 4$"),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, 1, "works is 8 or 10"),
        ({"train_batch_size": 0}, 1, "want at least 1, got 0"),
        ({"gradient_accumulation_steps": -2}, 1, "want at least 1, got -2"),
    ],
)
def test_e05_contradictions_are_one_message(given_keys: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.load(given_keys, world_size=world)
    assert len(caught.value.problems) == 1


def test_a_config_read_early_is_read_anew_for_the_real_world_size() -> None:
    early = EngineConfig.load({"train_batch_size": 8})
    late = EngineConfig.load(early, world_size=2)
    assert (early.train_micro_batch_size_per_gpu, late.train_micro_batch_size_per_gpu) == (8, 4)
    assert EngineConfig.load(early) is early


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("zero_optimization.sub_group_size", 1e9, 10**9),
        ("zero_optimization.reduce_bucket_size", "5e8", 5 * 10**8),
        ("aio.block_size", "1MiB", 2**20),
        ("tiers.device_bytes", "2GB", 2 * 10**9),
        ("tiers.host_bytes", "1.5GiB", 3 * 2**29),
        ("steps_per_print", float("inf"), None),
        ("gradient_clipping", 0, 0.0),
        ("gradient_clipping", 1, 1.0),
        ("fp16.loss_scale", 128, 128.0),
        ("tiers.lookahead", 3, 3),
        ("tiers.lookahead", "auto", "auto"),
        ("tiers.overlap_update", True, True),
    ],
)
def test_values_are_taken_as_meant(path: str, value: Any, wanted: Any) -> None:
    *blocks, name = path.split(".")
    config: dict[str, Any] = {}
    inner = config
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[name] = value
    result: Any = EngineConfig.load(config)
    for part in (*blocks, name):
        result = getattr(result, part)
    assert result == wanted
    assert type(result) is type(wanted)

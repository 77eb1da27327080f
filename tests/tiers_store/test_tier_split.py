"""Splitting planes between tiers by fraction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers.split import shard_on, split_counts, split_shard
from lamina.tiers.tier import Plane, PlaneSpec, ShardSpec, Tier

SHARD = ShardSpec(
    name="block",
    numel=10_000,
    planes=(
        PlaneSpec(plane=Plane.PARAM, itemsize=2),
        PlaneSpec(plane=Plane.EXP_AVG, itemsize=4),
        PlaneSpec(plane=Plane.EXP_AVG_SQ, itemsize=4),
    ),
)


@given(
    st.integers(0, 10**9),
    st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any),
    st.sampled_from([1, 16, 1024]),
)
def test_every_element_has_one_tier(numel: int, parts: list[int], granule: int) -> None:
    fractions = {tier: part / sum(parts) for tier, part in zip(Tier, parts, strict=True)}
    counts = split_counts(numel, fractions, granule=granule)
    assert sum(counts.values()) == numel
    assert min(counts.values()) >= 0
    holders = [tier for tier, part in zip(Tier, parts, strict=True) if part]
    for tier, part in zip(Tier, parts, strict=True):
        if part == 0:
            assert counts[tier] == 0
        else:
            assert abs(counts[tier] - numel * part / sum(parts)) <= 2 * granule
        if tier is not holders[-1] and numel % granule == 0:
            assert counts[tier] % granule == 0


@pytest.mark.parametrize("fractions", [{}, {Tier.HOST: 0.5}, {Tier.HOST: 1.5, Tier.NVME: -0.5}])
def test_fractions_that_are_none_are_refused(fractions: dict[Tier, float]) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        split_counts(10, fractions)


def test_a_shard_whose_planes_live_on_different_tiers() -> None:
    split = {
        Plane.PARAM: {Tier.DEVICE: 1.0},
        Plane.EXP_AVG: {Tier.HOST: 0.4, Tier.NVME: 0.6},
        Plane.EXP_AVG_SQ: {Tier.HOST: 0.4, Tier.NVME: 0.6},
    }
    pieces = split_shard(SHARD, split, granule=1000)
    assert [(piece.tier, piece.plane, piece.first, piece.numel) for piece in pieces] == [
        (Tier.DEVICE, Plane.PARAM, 0, 10_000),
        (Tier.HOST, Plane.EXP_AVG, 0, 4000),
        (Tier.NVME, Plane.EXP_AVG, 4000, 6000),
        (Tier.HOST, Plane.EXP_AVG_SQ, 0, 4000),
        (Tier.NVME, Plane.EXP_AVG_SQ, 4000, 6000),
    ]
    (nvme,) = shard_on(SHARD, pieces, Tier.NVME)
    assert (nvme.name, nvme.numel) == ("block[4000:10000]", 6000)
    assert [spec.plane for spec in nvme.planes] == [Plane.EXP_AVG, Plane.EXP_AVG_SQ]
    (device,) = shard_on(SHARD, pieces, Tier.DEVICE)
    assert (device.name, device.numel) == ("block", 10_000)

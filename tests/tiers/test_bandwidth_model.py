"""Link models: interpolation, mixes, contention, and corrections that outliers do not move."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import BandwidthModel, Curve, DiskSpeed, Link, Measured
from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.links.correction import THRESHOLD
from lamina.tiers.links.mix import mixed_seconds

GB = 1_000_000_000


def disk(read: float = 2.0 * GB, write: float = 4.0 * GB, **changes: object) -> Link:
    values: dict[str, object] = {"name": DISK, "read": Curve.flat(read), "write": Curve.flat(write)}
    return Link(**(values | changes))  # type: ignore[arg-type]


def step(busy_s: float, *, read: int = GB, written: int = GB) -> Measured:
    return Measured(link=DISK, read_bytes=read, written_bytes=written, busy_s=busy_s)


def test_a_rate_between_two_sizes_is_interpolated_over_the_logarithm() -> None:
    curve = Curve(points=((4096, 1.0), (65536, 3.0), (1 << 20, 4.0)))
    assert curve.rate(16384) == pytest.approx(2.0), "half way between 4 and 64 KiB in powers of two"
    assert [curve.rate(size) for size in (1, 4096, 65536, 1 << 20, 1 << 30)] == [1.0, 1.0, 3.0, 4.0, 4.0]
    assert curve.rate() == 4.0


@pytest.mark.parametrize("points", [(), ((4096, 1.0), (4096, 2.0)), ((8192, 1.0), (4096, 2.0)), ((4096, 0.0),)])
def test_a_curve_that_makes_no_sense_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"curve|rates"):
        Curve(points=points)


def test_half_duplex_adds_times_full_duplex_takes_the_longer() -> None:
    assert disk().seconds(2 * GB, 4 * GB) == pytest.approx(2.0)
    assert disk(mix_gain=2.0).seconds(2 * GB, 4 * GB) == pytest.approx(1.0)
    assert disk(mix_gain=2.0).seconds(4 * GB, 4 * GB) == pytest.approx(2.0)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1, 2))
def test_a_mix_lies_between_the_longer_stream_and_the_sum(read: float, write: float, gain: float) -> None:
    taken = mixed_seconds(read, write, gain)
    assert max(read, write) - 1e-9 <= taken <= read + write + 1e-9


def test_the_profile_s_mixed_point_comes_back_out_of_the_model() -> None:
    """Both sides of a measured mix end together, so mix_gain is the sum of the shares of the pure rates."""
    read, write, mixed_read, mixed_write = 2.63, 4.31, 1.74, 1.63
    gain = mixed_read / read + mixed_write / write
    link = disk(read, write, mix_gain=gain)
    # One second of the mix; the side that ends first leaves the other alone, which costs less than 5 percent here.
    assert link.seconds(mixed_read, mixed_write) == pytest.approx(1.0, rel=0.12)


def test_ranks_on_one_disk_share_it_and_lose_something_by_sharing() -> None:
    alone, four = disk(), disk(sharers=4, sharing_loss=0.1)
    assert four.read_s(GB) == pytest.approx(4 * 1.3 * alone.read_s(GB))


def test_two_paths_count_as_one_link_of_twice_the_slower_one() -> None:
    model = BandwidthModel.from_speeds(
        [DiskSpeed(read=2.0, write=6.0, direct=True), DiskSpeed(read=3.0, write=4.0, direct=True)]
    )
    link = model.link(DISK)
    assert (link.read.rate(), link.write.rate()) == (4.0, 8.0)


def test_a_link_that_is_unknown_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"host->moon.*nvme"):
        BandwidthModel([disk()]).link("host->moon")


def test_outliers_change_nothing() -> None:
    model = BandwidthModel([disk()])
    right = disk().seconds(GB, GB)
    told = [model.observe(step(seconds)) for seconds in (right, right, 7 * right, right, 0.1 * right, right, right)]
    assert told == [False] * 7
    assert model.factor(DISK) == 1.0


def test_small_deviations_change_nothing_however_long_they_last() -> None:
    model = BandwidthModel([disk()])
    assert not any(model.observe(step(disk().seconds(GB, GB) * (1 + 0.9 * THRESHOLD))) for _ in range(30))


def test_predictions_for_now_follow_small_deviations_that_plans_do_not() -> None:
    model = BandwidthModel([disk()])
    slower = 1 + 0.8 * THRESHOLD
    for _ in range(2):
        model.observe(step(disk().seconds(GB, GB) * slower))
        assert model.as_measured().link(DISK) == disk(), "two steps say nothing yet"
    for factor in (slower, 8.0):
        model.observe(step(disk().seconds(GB, GB) * factor))
        now = model.as_measured().link(DISK)
        assert now.read.rate() == pytest.approx(2 * GB / slower), "and an outlier changes nothing"
        assert now.write.rate() == pytest.approx(4 * GB / slower)
    assert model.link(DISK) == disk()


def test_a_disk_that_becomes_three_times_slower_is_known_within_five_steps() -> None:
    model = BandwidthModel([disk()])
    right = disk().seconds(GB, GB)
    for _ in range(10):
        assert not model.observe(step(right))
    told = [model.observe(step(3 * right)) for _ in range(5)]
    assert told.count(True) == 1
    assert model.link(DISK).read.rate() == pytest.approx(2 * GB / 3)
    assert model.link(DISK).write.rate() == pytest.approx(4 * GB / 3)
    recovered = [model.observe(step(right)) for _ in range(5)]
    assert any(recovered)
    assert model.factor(DISK) == pytest.approx(1.0)


def test_a_step_that_moves_next_to_nothing_says_nothing() -> None:
    model = BandwidthModel([disk()])
    assert not any(model.observe(step(1.0, read=4096, written=0)) for _ in range(20))
    assert model.factor(DISK) == 1.0


@given(st.lists(st.floats(0.2, 5.0), min_size=5, max_size=40))
def test_the_correction_is_always_a_value_that_was_measured_or_the_start(ratios: list[float]) -> None:
    model = BandwidthModel([disk()])
    right = disk().seconds(GB, GB)
    for ratio in ratios:
        model.observe(step(right * ratio))
    low, high = min([1.0, *ratios]), max([1.0, *ratios])
    assert low * 0.999 <= model.factor(DISK) <= high * 1.001
    steady = statistics.median(ratios)
    for _ in range(12):
        model.observe(step(right * steady))
    assert abs(steady / model.factor(DISK) - 1) <= THRESHOLD + 1e-9

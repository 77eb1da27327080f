"""Both directions of a disk told apart by what steps measured: rates that are known come back, whatever is mixed with what."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.tiers import Alone, BandwidthModel, Curve, Link, Measured
from lamina.tiers.links.bandwidth import DISK
from lamina.tiers.links.correction import Correction
from lamina.tiers.links.mix import mixed_seconds

GB = 1_000_000_000
MIB = 1 << 20


def disk(**changes: object) -> Link:
    values: dict[str, object] = {"name": DISK, "read": Curve.flat(2.0 * GB), "write": Curve.flat(3.0 * GB)}
    return Link(**(values | changes))  # type: ignore[arg-type]


def step(link: Link, *, read: int = GB, written: int = GB, mixed: float = 0.8) -> Measured:
    """What a step measures on this disk, when reads and writes are under way together for this share of the shorter's time."""
    both_s = mixed * min(link.read_s(read), link.write_s(written))
    reads_s, writes_s = link.read_s(read) - both_s, link.write_s(written) - both_s
    return Measured(
        link=DISK,
        read_bytes=read,
        written_bytes=written,
        busy_s=reads_s + writes_s + mixed_seconds(both_s, both_s, link.mix_gain),
        reads_alone=Alone(nbytes=int(reads_s * link.read.rate()), seconds=reads_s),
        writes_alone=Alone(nbytes=int(writes_s * link.write.rate()), seconds=writes_s),
    )


def noisy(measured: Measured, draw: random.Random, spread: float) -> Measured:
    """The same with all times off by some part of them."""
    both_s = measured.busy_s - measured.reads_alone.seconds - measured.writes_alone.seconds
    reads_s, writes_s, both_s = (
        seconds * draw.lognormvariate(0, spread)
        for seconds in (measured.reads_alone.seconds, measured.writes_alone.seconds, both_s)
    )
    return replace(
        measured,
        busy_s=reads_s + writes_s + both_s,
        reads_alone=replace(measured.reads_alone, seconds=reads_s),
        writes_alone=replace(measured.writes_alone, seconds=writes_s),
    )


SLOWER = st.floats(0.5, 16.0)


@given(
    reading=SLOWER,
    writing=SLOWER,
    mixed=st.floats(0.0, 0.95),
    read=st.integers(64 * MIB, GB),
    written=st.integers(64 * MIB, GB),
    gain=st.floats(1.0, 1.5),
)
def test_any_two_rates_are_known_after_a_few_steps(
    reading: float, writing: float, mixed: float, read: int, written: int, gain: float
) -> None:
    usual = disk(mix_gain=gain)
    model = BandwidthModel([usual])
    done = step(usual.slower(reading, writing), read=read, written=written, mixed=mixed)
    for _ in range(5):
        model.observe(done)
    assert model.factors(DISK) == pytest.approx((reading, writing), rel=0.1 + 0.05)
    now = model.as_measured().link(DISK)
    assert now.read.rate() == pytest.approx(usual.read.rate() / reading, rel=0.1)
    assert now.write.rate() == pytest.approx(usual.write.rate() / writing, rel=0.1)


@pytest.mark.parametrize(("reading", "writing"), [(1.0, 8.0), (8.0, 1.0), (8.0, 8.0)])
@pytest.mark.parametrize("mixed", [0.0, 0.5, 0.9])
def test_a_direction_that_is_throttled_is_told_from_the_other_through_noise_and_outliers(
    reading: float, writing: float, mixed: float
) -> None:
    draw, usual = random.Random(1), disk()
    model = BandwidthModel([usual])

    def run(link: Link, steps: int, outlier: int) -> None:
        for number in range(steps):
            done = noisy(step(link, mixed=mixed), draw, 0.05)
            model.observe(noisy(done, draw, 1.5) if number == outlier else done)

    run(usual, 8, outlier=3)
    assert model.factors(DISK) == (1.0, 1.0)
    run(usual.slower(reading, writing), 5, outlier=1)
    assert model.factors(DISK) == pytest.approx((reading, writing), rel=0.1)
    run(usual, 5, outlier=1)
    assert model.factors(DISK) == pytest.approx((1.0, 1.0), rel=0.1)


@pytest.mark.parametrize("mix_gain", [1.0, 1.4, 2.0])
def test_where_nothing_tells_the_directions_apart_both_change_alike(mix_gain: float) -> None:
    usual = disk(mix_gain=mix_gain)
    model = BandwidthModel([usual])
    alike = Measured(link=DISK, read_bytes=GB, written_bytes=2 * GB, busy_s=5 * usual.seconds(GB, 2 * GB))
    for _ in range(3):
        model.observe(alike)
    assert model.factors(DISK) == pytest.approx((5.0, 5.0))
    only_reads = step(usual.slower(3.0, 1.0), written=0)
    for _ in range(3):
        model.observe(only_reads)
    assert model.factors(DISK) == pytest.approx((3.0, 3.0))


def test_a_few_bytes_of_one_direction_say_little_of_it() -> None:
    """Their spell's edges are blurred by what is in flight: here twice as much as was written."""
    usual = disk(inflight_bytes=8 * MIB)
    done = step(usual, written=4 * MIB, mixed=0.0)
    blurred = replace(done.writes_alone, seconds=3 * done.writes_alone.seconds)
    model = BandwidthModel([usual])
    for _ in range(3):
        model.observe(replace(done, writes_alone=blurred, busy_s=done.busy_s + 2 * done.writes_alone.seconds))
    assert model.factors(DISK)[0] == pytest.approx(1.0, rel=0.02)


@given(SLOWER, SLOWER, st.floats(0.3, 3.0), st.floats(0.0, 1.0))
def test_the_whole_time_comes_out_as_measured_also_where_the_mix_is_not_as_modelled(
    reading: float, writing: float, off: float, mixed: float
) -> None:
    model = BandwidthModel([disk()])
    done = step(disk().slower(reading, writing), mixed=mixed)
    reads, writes = done.reads_alone, done.writes_alone
    both_s = (done.busy_s - reads.seconds - writes.seconds) * off
    done = replace(done, busy_s=reads.seconds + writes.seconds + both_s)
    for _ in range(3):
        model.observe(done)
    now = model.as_measured().link(DISK)
    again_s = now.read_s(reads.nbytes) + now.write_s(writes.nbytes)
    again_s += now.seconds(done.read_bytes - reads.nbytes, done.written_bytes - writes.nbytes)
    assert again_s == pytest.approx(done.busy_s, rel=1e-6)


def test_one_factor_of_both_is_that_of_what_was_measured_last() -> None:
    usual = disk(write=Curve.flat(2.0 * GB))
    model = BandwidthModel([usual])
    assert model.factor(DISK) == 1.0
    for _ in range(3):
        model.observe(step(usual.slower(1.0, 7.0), read=GB, written=GB))
    assert model.factor(DISK) == pytest.approx(4.0, rel=0.01)
    model.observe(step(usual.slower(1.0, 7.0), read=3 * GB, written=GB))
    assert model.factor(DISK) == pytest.approx(2.5, rel=0.01)


def test_directions_recover_each_for_itself() -> None:
    usual = disk()
    model = BandwidthModel([usual])
    for slower in ((6.0, 6.0), (6.0, 1.0), (1.0, 1.0)):
        for _ in range(5):
            model.observe(step(usual.slower(*slower)))
        assert model.factors(DISK) == pytest.approx(slower, rel=0.1)


def test_a_correction_is_never_the_mean_of_what_was_before_and_after_a_change() -> None:
    correction = Correction()
    for ratio in (8.0, 8.0, 8.0, 7.0, 1.0, 3.0, 1.0, 1.0, 1.0):
        correction.observe(ratio)
        assert correction.factor in (1.0, 8.0, 7.0)
    assert correction.factor == 1.0

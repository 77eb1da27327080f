"""Stripes that follow disks which become slower or faster: when new ones are asked for, and a run that gets them."""

import contextlib
import os
import random
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from disk_training import net, on_disks, shares, step, two_disks
from throttled_io import Bucket

from lamina.aio_native import AsyncIO
from lamina.bench.training.gpt import GPT, GPTShape
from lamina.engine import TrainingEngine
from lamina.engine.steering import device_work
from lamina.tiers import GenerationStore, NvmePath, Plane, PlaneSpec, ShardSpec
from lamina.tiers.links.device_identity import identify
from lamina.tiers.placement.stripe_balance import SETTLING_STEPS, WINDOW, WORTH, DeviceWork, StripeBalance
from lamina.tiers.placement.stripe_weights import device_shares

MIB = 1 << 20


def work(rates: Mapping[int, float], shares: Mapping[int, float], nbytes: int = 100 * MIB) -> dict[int, DeviceWork]:
    """Of a step that moves ``nbytes`` over devices of these rates."""
    return {
        device: DeviceWork(nbytes=int(nbytes * shares[device]), busy_s=nbytes * shares[device] / rate)
        for device, rate in rates.items()
    }


def proposals(
    balance: StripeBalance, steps: Sequence[Mapping[int, float]], *, shares: tuple[float, ...], follows: bool = True
) -> list[tuple[int, tuple[float, ...]]]:
    """(step, weights) of every proposal, of a store that follows them at once or not at all."""
    made = []
    for number, rates in enumerate(steps):
        weights = balance.after_step(work(rates, device_shares(balance.devices, shares)), shares)
        if weights is not None:
            made.append((number, weights))
            shares = weights if follows else shares
    return made


def test_a_slower_disk_gets_less_after_a_window_of_steps() -> None:
    balance = StripeBalance(devices=(1, 2))
    steps = [{1: 2e9, 2: 2e9}] * 10 + [{1: 0.5e9, 2: 2e9}] * 30
    made = proposals(balance, steps, shares=(0.5, 0.5))
    assert made == [(10 + WINDOW - 1, pytest.approx((0.2, 0.8)))]


def test_it_is_given_back_when_the_disk_is_fast_again() -> None:
    steps = [{1: 0.5e9, 2: 2e9}] * 10 + [{1: 2e9, 2: 2e9}] * 10
    made = proposals(StripeBalance(devices=(1, 2)), steps, shares=(0.5, 0.5))
    assert [weights for _, weights in made] == [pytest.approx((0.2, 0.8)), pytest.approx((0.5, 0.5))]


def test_single_slow_steps_and_noise_change_nothing() -> None:
    chance = random.Random(0)
    steps = [{device: 2e9 * chance.uniform(0.9, 1.1) for device in (1, 2, 3)} for _ in range(300)]
    for number in range(0, 300, 4):  # a hiccup that lasts two steps
        for late in steps[number : number + 2]:
            late[2] /= 10
    assert proposals(StripeBalance(devices=(1, 2, 3)), steps, shares=(1 / 3,) * 3) == []


def test_a_difference_that_is_not_worth_new_files_changes_nothing() -> None:
    """Even stripes over 1 and f take (1 + f) / 2f of the best time."""
    least = 1 / (1 + 2 * WORTH)
    for factor, number in ((least * 1.02, 0), (least * 0.98, 1)):
        steps = [{1: 1e9, 2: factor * 1e9}] * 10
        assert len(proposals(StripeBalance(devices=(1, 2)), steps, shares=(0.5, 0.5))) == number


def test_after_a_change_there_is_quiet_for_some_steps() -> None:
    steps = [{1: 0.5e9, 2: 2e9}] * WINDOW + [{1: 2e9, 2: 0.5e9}] * 20
    made = proposals(StripeBalance(devices=(1, 2)), steps, shares=(0.5, 0.5))
    assert [number for number, _ in made] == [WINDOW - 1, 2 * WINDOW - 1 + SETTLING_STEPS]


def test_what_the_store_could_not_follow_is_not_asked_for_again() -> None:
    steps = [{1: 0.5e9, 2: 2e9}] * 50
    assert len(proposals(StripeBalance(devices=(1, 2)), steps, shares=(0.5, 0.5), follows=False)) == 1


def test_paths_on_one_device_stay_alike_and_one_without_a_share_stays_without() -> None:
    balance = StripeBalance(devices=(1, 1, 2, 3))
    made = proposals(balance, [{1: 2e9, 2: 1e9}] * WINDOW, shares=(0.25, 0.25, 0.5, 0.0))
    assert made == [(WINDOW - 1, pytest.approx((1 / 3, 1 / 3, 1 / 3, 0.0)))]


@pytest.mark.parametrize(
    "step",
    [
        {},
        {1: DeviceWork(nbytes=100 * MIB, busy_s=1.0)},
        {1: DeviceWork(nbytes=100 * MIB, busy_s=1.0), 2: DeviceWork(nbytes=100, busy_s=1.0)},
        {1: DeviceWork(nbytes=100 * MIB, busy_s=0.0), 2: DeviceWork(nbytes=100 * MIB, busy_s=1.0)},
    ],
)
def test_steps_that_tell_no_rates_change_nothing(step: dict[int, DeviceWork]) -> None:
    balance = StripeBalance(devices=(1, 2))
    assert [balance.after_step(step, (0.5, 0.5)) for _ in range(10)] == [None] * 10


def test_one_device_has_nothing_to_balance() -> None:
    assert proposals(StripeBalance(devices=(1, 1)), [{1: 1e9}] * 10, shares=(0.9, 0.1)) == []


# -- training on two disks -----------------------------------------------------------------------------------------------


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, Bucket]:
    return two_disks(tmp_path, monkeypatch)


@pytest.mark.parametrize("generations", [1, 2])
def test_shares_follow_a_disk_that_is_throttled_in_mid_run(
    disks: dict[Path, Bucket], monkeypatch: pytest.MonkeyPatch, generations: int
) -> None:
    with on_disks(disks, monkeypatch, net(), job="untouched", generations=generations) as engine:
        untouched = [step(engine, number) for number in range(16)]
        assert shares(engine) == (0.5, 0.5)
        assert not [note for note in engine.plan.changes if "stripes" in note]
        assert "stripes: 50.0% on" in str(engine.plan)
    slow = next(iter(disks))
    with on_disks(disks, monkeypatch, net(), job="throttled", generations=generations) as engine:
        losses = [step(engine, number) for number in range(6)]
        disks[slow].slow_down(4)
        losses += [step(engine, number) for number in range(6, 11)]
        assert shares(engine) == pytest.approx((0.2, 0.8), abs=0.02), "five steps later"
        losses += [step(engine, number) for number in range(11, 16)]
        assert shares(engine) == pytest.approx((0.2, 0.8), abs=0.02)
        notes = [note for note in engine.plan.changes if "stripes" in note]
        assert engine.plan.as_dict()["stripes"][str(slow)] == pytest.approx(0.2, abs=0.02)
        told = str(engine.plan)
    assert losses == untouched
    assert len(notes) == 1
    a, b = re.escape(str(slow)), re.escape(str(slow.parent / "b"))
    asked = re.fullmatch(
        rf"the disks' rates ask for other stripes \((.*)% on {a}, (.*)% on {b}\): "
        "the coming generations are laid out so",
        notes[0],
    )
    assert asked is not None, notes[0]
    # What is read ahead counts to the step in which it arrives, so the figures differ a little from run to run.
    assert [float(share) for share in asked.groups()] == pytest.approx([20.0, 80.0], abs=2.0)
    assert notes[0] in told


def test_a_full_disk_keeps_the_stripes_and_is_told_once(
    disks: dict[Path, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disks(disks, monkeypatch, net()) as engine:
        store = engine.runtime.store
        assert store is not None
        monkeypatch.setattr(store._pool, "rooms", lambda replacing=(): [0, 0])
        next(iter(disks.values())).slow_down(4)
        losses = [step(engine, number) for number in range(12)]
        assert shares(engine) == (0.5, 0.5)
        notes = [note for note in engine.plan.changes if "stripes" in note]
    assert len(notes) == 1
    assert "but there is no room" in notes[0]
    assert losses[-1] < losses[0]


def test_unequal_disks_get_stripes_so_from_the_start_and_a_kept_store_opens_with_other_rates(
    disks: dict[Path, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files stay as they are until the steps, too, ask for others."""
    first = next(iter(disks.values()))
    with on_disks(disks, monkeypatch, net(), job="whole") as engine:
        whole = [step(engine, number) for number in range(14)]
    first.slow_down(3)
    with on_disks(disks, monkeypatch, net(), keep_state=True, resume=False) as engine:
        assert shares(engine) == pytest.approx((0.25, 0.75), abs=0.01)
        losses = [step(engine, number) for number in range(4)]
        assert "in proportion to these rates" in str(engine.plan)
    first.slow_down(1 / 9)
    with on_disks(disks, monkeypatch, net(), keep_state=True, resume=True) as engine:
        assert shares(engine) == pytest.approx((0.25, 0.75), abs=0.01)
        losses += [step(engine, number) for number in range(4, 14)]
        assert shares(engine) == pytest.approx((0.75, 0.25), abs=0.01)
    assert losses == whole


def write_a_generation(paths: Sequence[NvmePath], io: AsyncIO) -> tuple[tuple[int, ...], dict[int, DeviceWork]]:
    """What a store on these paths calls their devices, and what each did while 16 MiB were written."""
    shard = ShardSpec(name="s", numel=8 * MIB, planes=(PlaneSpec(plane=Plane.PARAM, itemsize=2),))
    with GenerationStore.open(paths, job="j", rank=0, shards=[shard], io=io) as store:
        before = io.stats()
        with store.begin() as transaction:
            transaction.write("s", Plane.PARAM, bytes(16 * MIB))
            transaction.commit(1)
        return tuple(store.devices), device_work(before, io.stats())


def test_a_file_system_in_memory_is_another_device_than_a_disk(tmp_path: Path) -> None:
    """No shim: what the store calls devices are those that the I/O counts, and each moves its share."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm cannot be written or is no other device than the temporary folder")
    with tempfile.TemporaryDirectory(dir=memory) as other, AsyncIO() as io:
        paths = [NvmePath(path=str(tmp_path), weight=3), NvmePath(path=other, weight=1)]
        devices, done = write_a_generation(paths, io)
    assert devices == (tmp_path.stat().st_dev, memory.stat().st_dev)
    assert [round(done[device].nbytes / MIB) for device in devices] == [12, 4]
    assert all(done[device].busy_s > 0 for device in devices)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on an overlay file system, whose upper layer is a file system in memory: files and folders differ in st_dev."""
    memory, mount = tmp_path / "memory", tmp_path / "overlay"
    for folder in (memory, mount, tmp_path / "lower"):
        folder.mkdir()
    layers = f"lowerdir={tmp_path / 'lower'},upperdir={memory / 'upper'},workdir={memory / 'work'}"
    with contextlib.ExitStack() as undo:
        for command, made in (
            (["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(memory)], memory),
            (["mount", "-t", "overlay", "-o", layers, "overlay", str(mount)], mount),
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount: {done.stderr.strip()}")
            undo.callback(subprocess.run, ["umount", str(made)], check=True)
            if made is memory:
                (memory / "upper").mkdir()
                (memory / "work").mkdir()
        yield mount


@pytest.mark.root
def test_on_an_overlay_the_devices_are_those_of_the_files(tmp_path: Path, overlay: Path) -> None:
    (overlay / "file").touch()
    if os.stat(overlay).st_dev == os.stat(overlay / "file").st_dev:
        pytest.skip("this kernel gives files of an overlay the device of their folder")
    plain = tmp_path / "plain"
    plain.mkdir()
    with AsyncIO() as io:
        paths = [NvmePath(path=str(plain), weight=3), NvmePath(path=str(overlay), weight=1)]
        devices, done = write_a_generation(paths, io)
    assert [round(done[device].nbytes / MIB) for device in devices] == [12, 4]
    assert identify(overlay).capacity_bytes == 64 * MIB
    assert sorted(os.listdir(overlay)) == ["file", "j"], "looking leaves no file"


@pytest.mark.slow
def test_the_step_time_follows_too(disks: dict[Path, Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fifth step on within 10 percent of a run whose stripes were right for the slow disk from the start."""
    torch.set_num_threads(1)
    shape = GPTShape(layers=4, dim=256, heads=4, seq=16)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    bf16 = {"bf16": {"enabled": True}}

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(shape)

    def seconds(engine: TrainingEngine, steps: int) -> list[float]:
        taken = []
        for _ in range(steps):
            engine.backward(engine(tokens, tokens))
            engine.step()
            taken.append(engine.metrics().step_s)
        return taken

    slow = next(iter(disks.values()))
    with on_disks(disks, monkeypatch, model(), waits=True, changes=bf16, job="throttled") as engine:
        before = seconds(engine, 6)
        slow.slow_down(4)
        after = seconds(engine, 12)
        assert shares(engine) == pytest.approx((0.2, 0.8), abs=0.02)
    with on_disks(disks, monkeypatch, model(), waits=True, changes=bf16, job="optimum") as engine:
        assert shares(engine) == pytest.approx((0.2, 0.8), abs=0.02)
        optimum = statistics.median(seconds(engine, 12)[3:])
    told = f"before {before}, throttled {after}, optimum {optimum:.3f}"
    print(told)
    assert max(after[:2]) > 1.5 * optimum, told
    assert statistics.median(after[5:]) <= 1.1 * optimum, told

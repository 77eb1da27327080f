"""How long a start takes: in proportion to the model, however many parameters it is cut into, and not in silence (F-07)."""

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamina.engine import initialize
from lamina.tiers.placement.group_limits import LARGE_NUMEL, MOST_GROUPS, TINY_NUMEL, GroupLimits
from lamina.zero.groups.grouping import find_groups
from lamina.zero.homes import start_progress
from lamina.zero.homes.start_progress import StartProgress

TIERS = ("memory", "nvme", "budgets")


class Flat(nn.Module):
    """All parameters in one module."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(width, width) for _ in range(count))


def blocks(count: int, width: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


def nested(count: int, width: int) -> nn.Module:
    """Blocks of ten layers."""
    return nn.ModuleList(blocks(10, width) for _ in range(count // 10))


MODELS = {"flat": Flat, "blocks": blocks, "nested": nested}


def config(tier: str, path: Path, state_bytes: int) -> dict[str, Any]:
    """``state_bytes``: of the parameters; budgets hold a part of all state."""
    common = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if tier == "memory":
        return common
    if tier == "nvme":
        nvme = {"device": "nvme"}
        zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
        return common | {"zero_optimization": zero, "tiers": {"nvme": [str(path)]}}
    # A module's own parameters are fetched together, so the window holds them all.
    budgets = {"device_bytes": state_bytes * 5 // 4 + (1 << 20), "host_bytes": state_bytes * 3 // 2 + (20 << 20)}
    return common | {"tiers": {"nvme": [str(path)], **budgets}}


def operations(model: nn.Module, settings: dict[str, Any]) -> int:
    """Calls, of Python and of C, that initialize() makes."""
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        engine = initialize(model, config=settings)[0]
    finally:
        sys.setprofile(None)
    engine.close()
    return count


@pytest.mark.parametrize("tier", ["memory", "nvme"])
@pytest.mark.parametrize("kind", MODELS)
def test_f07_twice_the_parameters_take_twice_the_work(
    kind: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second half of the parameters adds is no more than what the first half took, by much."""
    monkeypatch.setattr("lamina.tiers.links.known_links.probe_disk", fast_disk)
    width = 96  # 36 kB: too small to be fetched alone
    counts = [operations(MODELS[kind](n, width), config(tier, tmp_path, n * width**2 * 4)) for n in (20, 100, 180, 340)]
    few, some, many = (after - before for before, after in itertools.pairwise(counts))
    assert some <= 1.5 * few + 2000, counts
    assert many <= 2 * 1.5 * some + 2000, counts


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("count", "width"), [(5000, 100), (5000, 4), (300, 1000)])
def test_f07_the_number_of_groups_is_bounded(kind: str, count: int, width: int) -> None:
    """What is decided for each group, and weighed up against the others, must not grow with the model."""
    with torch.device("meta"):
        model = MODELS[kind](count, width)
    limits = GroupLimits().for_model(count * width**2)
    groups = find_groups(model, tiny_numel=limits.tiny_numel)
    assert sum(group.numel for group in groups) == count * width**2
    assert len(groups) <= MOST_GROUPS + 1
    assert len(groups) >= min(count, MOST_GROUPS) // 10 or kind == "flat" or width == 4


def fast_disk(*_: Any) -> Any:
    from lamina.tiers import DiskSpeed

    return DiskSpeed(read=2e9, write=2e9, direct=True)


def started_in(model: nn.Module, settings: dict[str, Any]) -> float:
    began = time.perf_counter()
    engine = initialize(model, config=settings)[0]
    taken = time.perf_counter() - began
    engine.close()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", MODELS)
def test_f07_each_of_five_thousand_parameters_takes_no_more_work_than_each_of_a_thousand(
    kind: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls, which do not depend on what else the machine does; the seconds of 200 MB as 5,000 matrices and as 20 are printed,
    the best of three in turn."""
    width = 100
    with monkeypatch.context() as patch:
        patch.setattr("lamina.tiers.links.known_links.probe_disk", fast_disk)
        some, many = (
            operations(MODELS[kind](n, width), config(tier, tmp_path, n * width**2 * 4)) for n in (1000, 5000)
        )
    assert many <= 1.2 * 5 * some
    assert many <= 1000 * 5000
    times: dict[str, list[float]] = {"small": [], "large": []}
    for _ in range(3):
        for name, model in (("small", MODELS[kind](5000, 100)), ("large", blocks(20, 1581))):
            times[name].append(started_in(model, config(tier, tmp_path, 200_000_000)))
    small, large = (min(taken) for taken in times.values())
    print(f"{kind}, {tier}: {many / 5000:.0f} calls for each of 5,000; {small:.2f} s, as 20 large ones {large:.2f} s")


def test_progress_is_told_after_ten_seconds_and_then_now_and_again() -> None:
    told: list[str] = []
    clock = iter((100.0, 105.0, 109.9, 110.0, 115.0, 120.5, 121.0))
    progress = StartProgress(1000, told.append, clock=lambda: next(clock))
    for nbytes in (100, 100, 200, 100, 250, 250):
        progress.advance(nbytes)
    assert told == [
        "initialize: 400 of 1,000 bytes of parameters are at home (40%) after 10 s",
        "initialize: 750 of 1,000 bytes of parameters are at home (75%) after 20 s",
        "initialize: 1,000 of 1,000 bytes of parameters are at home (100%) after 21 s",
    ]
    quick: list[str] = []
    progress = StartProgress(10, quick.append, clock=lambda: 5.0)
    progress.advance(10)
    assert quick == []


@pytest.mark.parametrize("tier", TIERS)
def test_initialize_tells_its_progress_on_stderr(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started() -> tuple[str, str]:
        initialize(blocks(4, 256), config=config(tier, tmp_path, 4 * 4 * 256**2))[0].close()
        printed = capsys.readouterr()
        return printed.out, printed.err

    monkeypatch.setattr(start_progress, "FIRST_S", 1e6)  # however slow the machine is
    assert started() == ("", "")
    monkeypatch.setattr(start_progress, "FIRST_S", 0.0)
    out, err = started()
    assert out == ""
    assert "lamina: initialize: 1,048,576 of 1,048,576 bytes of parameters are at home (100%)" in err


def test_the_sizes_of_these_models_are_what_the_test_is_about() -> None:
    assert 96**2 < TINY_NUMEL < 256**2 < LARGE_NUMEL

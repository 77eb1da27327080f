"""The rest of the path: memory, GPU, all-gather, and the picture of it all."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from nvme_toys import Ticking, measured, point

from lamina.aio_native import AlignedBuffer
from lamina.aio_native.buffers import resident_bytes
from lamina.bench.nvme import rates as rates_module
from lamina.bench.nvme.gather import GatherError, all_gather_rate
from lamina.bench.nvme.measure import Created
from lamina.bench.nvme.outcome import FioPair, Outcome, PageEffect, PathOutcome
from lamina.bench.nvme.points import Workload
from lamina.bench.nvme.rates import device_rates, gpu_missing, memory_rates
from lamina.bench.nvme.verdict import best, recommend, summarise
from lamina.tiers.links.device_identity import identify


def fine() -> None:
    """Nothing asks to stop."""


def test_memory_rates_are_bytes_over_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "time", Ticking(step_s=1 / 64))
    rates = memory_rates(0.0, array_bytes=1 << 20)
    arrays = {"copy": 2, "triad": 3, "stream": 6, "adam": 7}
    assert rates == {name: number * 64 << 20 for name, number in arrays.items()} | {"adam_elements": 64 << 18}


def test_memory_that_is_only_read_is_real_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = []
    real = rates_module._interleaved

    def look(jobs: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
        resident.extend(resident_bytes(buffer.address, buffer.nbytes)[0] for buffer in made)
        return real(jobs, seconds)

    made: list[AlignedBuffer] = []
    monkeypatch.setattr(rates_module, "_interleaved", look)
    monkeypatch.setattr(rates_module, "AlignedBuffer", lambda nbytes: made.append(AlignedBuffer(nbytes)) or made[-1])
    memory_rates(0.0, array_bytes=4 << 20)
    assert len(resident) == 4
    assert min(resident) >= 4 << 20


@pytest.mark.gpu
@pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())
def test_device_rates() -> None:
    rates = device_rates(0.1, nbytes=16 << 20)
    assert set(rates) == {"host_to_device", "device_to_host", "both_ways"}
    assert all(rate > 1e8 for rate in rates.values())
    assert rates["both_ways"] > 0.7 * min(rates["host_to_device"], rates["device_to_host"])


@pytest.mark.distributed
def test_an_all_gather_between_two_processes(tmp_path: Path) -> None:
    rate = all_gather_rate(tmp_path / "store-0.bin", seconds=0.05, timeout_s=100.0, check=fine, shard_bytes=1 << 20)
    assert 0 < rate < 1e12


def test_an_all_gather_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(GatherError, match="not done after 0 s"):
        all_gather_rate(tmp_path / "store", seconds=1.0, timeout_s=0.0, check=fine)


def outcome_of(path: Path, *, fio: bool) -> PathOutcome:
    """A made-up path with figures everywhere."""
    results = []
    for workload, peak in zip(Workload, (2.7e9, 4.4e9, 3.3e9), strict=True):
        for block in (1 << 16, 1 << 20, 8 << 20):
            for depth in (1, 4, 16):
                rate = peak * (0.4 + 0.3 * (block > 1 << 16) + 0.3 * (depth > 1))
                results += [
                    measured(rate * share, at=point(block=block, depth=depth), workload=workload)
                    for share in (0.98, 1, 1.02)
                ]
    found = PathOutcome(
        path=path,
        identity=identify(path),
        created=Created(
            direct=True,
            reason="",
            file_system="ext4",
            alignment=512,
            preallocated=True,
            file_bytes=1 << 30,
            first_write=2.5e9,
            written_bytes=1,
            notes=(),
        ),
        page_kind="thp",
        file_bytes=1 << 30,
        results=results,
        chosen=recommend(results, list(Workload)),
    )
    for workload in Workload:
        best_one = best(results, workload)
        assert best_one is not None
        found.best[workload] = best_one
        if workload is not Workload.MIX:
            found.pages[workload] = PageEffect(huge=summarise([2e9, 2.1e9]), small=summarise([1e9, 1.1e9]))
        if fio:
            values = (1e9, 1.1e9, 1.2e9)
            found.fio.append(
                FioPair(
                    workload=workload,
                    point=point(),
                    fio_point=point(),
                    ours=values,
                    fio=values,
                    same=values,
                    fio_page_kind="thp",
                    grid={},
                )
            )
    return found


def test_a_picture_of_several_paths(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lamina.bench.nvme.picture import draw

    two = dataclasses.replace(outcome_of(tmp_path, fio=False), path=tmp_path / "other")
    del two.best[Workload.MIX]
    draw(Outcome(paths=[outcome_of(tmp_path, fio=True), two]), tmp_path / "two.svg")
    text = (tmp_path / "two.svg").read_text()
    assert text.count("<!-- What makes the difference -->") == 2
    for wanted in ("read, best", "fio", "4 KiB pages", "fresh space", "Read: 2.70 GB/s", str(tmp_path / "other")):
        assert f"<!-- {wanted}" in text or wanted in text


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lamina.bench.nvme.picture import check_ending

    for name in ("p.bmp", "p", "p.png.txt"):
        with pytest.raises(ValueError, match=f"{name}: no picture of this kind"):
            check_ending(tmp_path / name)
    check_ending(tmp_path / "p.PNG")

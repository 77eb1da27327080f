"""Gradients that the host budget cannot hold go to a scratch file on nvme and come back: the numbers do not change."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, differences, on_nvme, settings, train_with_engine, train_with_torch

from lamina.engine import initialize
from lamina.tiers import Budgets, PlacementError, Residency, SegmentSize, Tier, TransferHandle, Wishes, place
from lamina.tiers.nvme.handle import FailedStart, Part
from lamina.tiers.nvme.scratch import Scratch
from lamina.zero import get_full, set_full
from lamina.zero.gradients.norm import GradientNorm
from lamina.zero.gradients.planes import Gradients
from lamina.zero.step.update import Updater

MODEL = {"blocks": 8, "tied": False}
HOST_BYTES = 1_750_000  # update buffers and three of ten gradient planes


def tight(path: Path, *, host_bytes: int = HOST_BYTES, **changes: Any) -> dict[str, Any]:
    return settings(**changes, **on_nvme(path, host_bytes=host_bytes, overlap_update=False))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_is_bit_equal_to_plain_torch(accumulation: int, tmp_path: Path) -> None:
    tiered = train_with_engine(tight(tmp_path, gradient_accumulation_steps=accumulation), **MODEL)
    assert list(differences(tiered, train_with_torch(accumulation=accumulation, **MODEL))) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("accumulation", [1, 3])
def test_bf16_with_clipping_is_bit_equal_to_memory(accumulation: int, tmp_path: Path) -> None:
    common = {"bf16": {"enabled": True}, "gradient_clipping": 0.05, "gradient_accumulation_steps": accumulation}
    tiered = train_with_engine(tight(tmp_path, host_bytes=1_350_000, **common), **MODEL)
    assert list(differences(tiered, train_with_engine(settings(**common), **MODEL))) == []


def test_spilled_gradients_can_be_read_and_changed_and_the_budget_holds(tmp_path: Path) -> None:
    model, other = build(**MODEL), build(**MODEL)
    engine = initialize(model, config=tight(tmp_path))[0]
    free = initialize(other, config=settings())[0]
    with engine, free:
        for run in (engine, free):
            run.backward(run(*batch(0)))
        spilled = [plane for plane in engine.runtime.gradients.planes.values() if plane.residency is Residency.ABSENT]
        assert spilled, "the budget is too small for all gradients"
        assert (tmp_path / "default" / "rank0" / "scratch.bin").exists() is False, "the file has no name"
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(get_full(parameter, "grad"), get_full(twin, "grad"))
            set_full(parameter, "grad", get_full(parameter, "grad") * 3)
            set_full(twin, "grad", get_full(twin, "grad") * 3)
        for run in (engine, free):
            run.step()
        assert engine.get_global_grad_norm() == free.get_global_grad_norm()
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(get_full(parameter, "master"), get_full(twin, "master"))
        assert engine.runtime.host.report().peak <= HOST_BYTES


@pytest.mark.parametrize("call", ["start_write", "start_read"])
def test_a_scratch_file_that_fails_loses_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each transfer fails once: the values stay where they were, and the next attempt succeeds."""
    model, other = build(**MODEL), build(**MODEL)
    engine = initialize(model, config=tight(tmp_path))[0]
    free = initialize(other, config=settings())[0]
    real = getattr(Scratch, call)
    failed: list[int] = []

    def once(self: Scratch, offset: int, view: memoryview) -> TransferHandle:
        if offset not in failed:
            failed.append(offset)
            return TransferHandle([Part(0, FailedStart(OSError(5, "Input/output error")))], view)
        return real(self, offset, view)

    with engine, free:
        for run in (engine, free):
            run.backward(run(*batch(0)))
        twins = dict(other.named_parameters())
        with monkeypatch.context() as patch:
            patch.setattr(Scratch, call, once)
            refused = 0
            for name, parameter in model.named_parameters():
                for _ in range(4):
                    try:
                        found = get_full(parameter, "grad")
                    except OSError:
                        refused += 1
                        continue
                    assert torch.equal(found, get_full(twins[name], "grad"))
                    break
                else:
                    pytest.fail(f"{name} was never read")
            assert refused
        for run in (engine, free):
            run.step()
        for name, parameter in model.named_parameters():
            assert torch.equal(get_full(parameter, "master"), get_full(twins[name], "master"))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_paths_share_the_scratch_space(accumulation: int, tmp_path: Path) -> None:
    config = tight(tmp_path, gradient_accumulation_steps=accumulation)
    config["tiers"]["nvme"] = [str(tmp_path / "a"), str(tmp_path / "b")]
    tiered = train_with_engine(config, **MODEL)
    assert list(differences(tiered, train_with_torch(accumulation=accumulation, **MODEL))) == []


class Watched:
    """A transfer that notes when it is waited for; it is never done before that."""

    def __init__(self, inner: TransferHandle, name: str, events: list[str]) -> None:
        self._inner, self._name, self._events = inner, name, events
        events.append(f"start {name}")

    def done(self) -> bool:
        return False

    def wait(self) -> int:
        self._events.append(f"wait {self._name}")
        return self._inner.wait()

    def drain(self) -> None:
        self._inner.drain()


def noted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, events: list[str]) -> None:
    inner = getattr(owner, name)

    def note(*args: Any) -> Any:
        events.append(name)
        return inner(*args)

    monkeypatch.setattr(owner, name, note)


def test_writes_and_reads_run_ahead_of_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    start_write, start_read = Scratch.start_write, Scratch.start_read
    monkeypatch.setattr(
        Scratch, "start_write", lambda s, at, view: Watched(start_write(s, at, view), f"write {at}", events)
    )
    monkeypatch.setattr(
        Scratch, "start_read", lambda s, at, view: Watched(start_read(s, at, view), f"read {at}", events)
    )
    # In the backward pass, for the norm, and in the update.
    for owner, name in ((Gradients, "add"), (GradientNorm, "_squares"), (Updater, "_adam")):
        noted(monkeypatch, owner, name, events)
    config = tight(tmp_path, host_bytes=HOST_BYTES + 300_000, gradient_accumulation_steps=2)
    tiered = train_with_engine(config, steps=2, **MODEL)
    assert list(differences(tiered, train_with_torch(steps=2, accumulation=2, **MODEL))) == []
    for kind in ("write", "read"):
        begun = [index for index, event in enumerate(events) if event.startswith(f"start {kind}")]
        at_once = [
            index for index in begun if events[index + 1 : index + 2] == [events[index].replace("start", "wait")]
        ]
        assert len(begun) > 8
        assert len(at_once) < len(begun) / 2, events


def test_a_disk_that_fails_stops_the_step_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(scratch: Scratch, offset: int, view: memoryview) -> TransferHandle:
        return TransferHandle([Part(0, FailedStart(OSError(5, "Input/output error", "scratch.bin")))], view)

    with initialize(build(**MODEL), config=tight(tmp_path))[0] as engine:
        monkeypatch.setattr(Scratch, "start_read", failing)
        with pytest.raises(OSError, match="Input/output error"):  # noqa: PT012
            engine.backward(engine(*batch(0)))
            engine.step()
        monkeypatch.undo()
        engine.zero_grad()
        for index in range(2):
            engine.backward(engine(*batch(index)))
            engine.step()


def sizes(count: int) -> list[SegmentSize]:
    return [
        SegmentSize(
            name=f"s{index}",
            group=index,
            full_numel=1 << 20,
            shard_numel=1 << 20,
            param_itemsize=4,
            state_itemsizes=(4, 4),
            grad_itemsize=4,
        )
        for index in range(count)
    ]


def test_the_placement_keeps_gradients_in_host_memory_where_they_fit() -> None:
    wishes = Wishes(param_tiers=(Tier.NVME,), state_tiers=(Tier.HOST, Tier.NVME))
    staging = 3 * 12 << 20
    enough = place(sizes(10), Budgets(host_bytes=staging + (40 << 20)), wishes)
    assert enough.scratch_bytes == 0
    less = place(sizes(10), Budgets(host_bytes=staging // 2 + (40 << 20)), wishes)
    assert less.scratch_bytes == 0, "smaller update buffers come first"
    least = place(sizes(10), Budgets(host_bytes=staging // 2 + (8 << 20)), wishes)
    assert least.scratch_bytes == 40 << 20
    assert least.nvme_items["gradient scratch"] == 40 << 20
    assert {home.state for home in least.homes.values()} == {Tier.NVME}
    assert "scratch" in least.reasons[0]
    with pytest.raises(PlacementError, match="Write 27,262,976 or more"):
        place(sizes(10), Budgets(host_bytes=staging // 2 + (8 << 20) - 1), wishes)


def test_without_nvme_there_is_no_scratch_file() -> None:
    with pytest.raises(PlacementError, match="gradients 41,943,040"):
        place(sizes(10), Budgets(host_bytes=1 << 20), Wishes(param_tiers=(Tier.DEVICE,), state_tiers=(Tier.HOST,)))

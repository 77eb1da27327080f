"""Parameters whose fetched copies an update renewed are not read again: exact bytes, the same numbers, and no stale ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import bytes_read, differences, on_nvme, settings, train_with_engine
from torch import nn

from lamina.engine import TrainingEngine, initialize
from lamina.zero import GatheredParameters, get_full, set_full

WIDTH = 64
MATRIX = WIDTH * WIDTH
PAGES = 2 * MATRIX
"""Bytes of a group in bf16: whole pages, so that reads are what is wanted and no more."""


class Chain(nn.Module):
    """Blocks of one square matrix each."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def batch_of(index: int) -> torch.Tensor:
    """Wants a gradient, so that the backward pass needs every matrix."""
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
    return values.to(torch.bfloat16).requires_grad_()


def step(engine: TrainingEngine, index: int = 0) -> float:
    loss = engine(batch_of(index))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def config(folder: Path, window: int, **changes: Any) -> dict[str, Any]:
    """A window of so many blocks; nothing is fetched ahead, so that every byte is read in the step that uses it."""
    tiers = {"device_bytes": window * PAGES, "host_bytes": 4_000_000, "lookahead": 0, "overlap_update": False}
    return settings(**({"bf16": {"enabled": True}, "gradient_clipping": 1.0} | changes), **on_nvme(folder, **tiers))


@pytest.mark.parametrize("window", [1, 2, 4, 6])
def test_a_step_reads_exactly_what_its_window_does_not_keep(window: int, tmp_path: Path) -> None:
    blocks = 6
    torch.manual_seed(0)
    with initialize(Chain(blocks), config=config(tmp_path, window))[0] as engine:
        step(engine)
        before = bytes_read(engine)
        for index in range(3):
            step(engine, index)
            now = bytes_read(engine)
            if index:
                fetched = 2 * (blocks - window)
                # The update reads the remainder (2 bytes) and both moments (8), and parameters that are not in the window.
                updated = blocks * 5 + (blocks - window)
                assert now - before == (fetched + updated) * PAGES
            before = now


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("window", [1, 3])
def test_kept_copies_change_no_bit(window: int, clip: float, tmp_path: Path) -> None:
    common = {"bf16": {"enabled": True}, "gradient_clipping": clip}
    tiers = {"device_bytes": window * 140_000, "host_bytes": 3_000_000}
    tiered = train_with_engine(settings(**common, **on_nvme(tmp_path, **tiers)), tied=False, steps=5)
    assert list(differences(tiered, train_with_engine(settings(**common), tied=False, steps=5))) == []


def test_a_kept_copy_is_out_of_reach_between_two_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain(3)
    with initialize(model, config=config(tmp_path, 3))[0] as engine:
        step(engine)
        weight = model.blocks[0].weight
        assert bool(torch.isnan(weight).all())
        with pytest.raises(RuntimeError), torch.no_grad():
            weight.mul_(2)
        before = bytes_read(engine)
        step(engine)
        assert bytes_read(engine) - before == 3 * 5 * PAGES, "all of them were kept"


@pytest.mark.parametrize("how", ["set_full", "gathered", "load_checkpoint"])
def test_edits_between_two_steps_reach_the_next_forward_pass(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain(3)
    with initialize(model, config=config(tmp_path / "nvme", 3))[0] as engine:
        first = step(engine)
        engine.save_checkpoint(str(tmp_path / "saved"))
        second = step(engine)
        weight = model.blocks[1].weight
        if how == "load_checkpoint":
            engine.load_checkpoint(str(tmp_path / "saved"))
            assert step(engine) == second
            return
        zeros = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
        if how == "set_full":
            set_full(weight, "param", zeros)
        else:
            with GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(zeros)
        assert first > 0
        assert step(engine) == 0.0, "nothing passes a matrix of zeros"


def test_a_step_that_fails_to_commit_leaves_the_old_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with initialize(Chain(3), config=config(tmp_path, 3))[0] as engine:
        step(engine)
        meta = engine.optimizer.generation_meta
        x = batch_of(7)
        before = engine(x)
        engine.backward(before)

        def full() -> dict[str, object]:
            raise OSError(28, "No space left on device")

        engine.optimizer.generation_meta = full
        with pytest.raises(OSError, match="No space left"):
            engine.step()
        engine.optimizer.generation_meta = meta
        again = engine(x)
        assert torch.equal(before, again)
        engine.backward(again)
        engine.step()
        assert not torch.equal(engine(x), again)


def test_a_skipped_step_keeps_copies_and_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bf16 = {"enabled": True, "check_grad_overflow": True}
    with initialize(Chain(4), config=config(tmp_path, 2, bf16=bf16))[0] as engine:
        for index in range(3):
            step(engine, index)
        before = bytes_read(engine)
        engine.backward(engine(batch_of(3)) * float("inf"))
        engine.step()
        assert not engine.was_step_applied()
        assert bytes_read(engine) - before == 2 * 2 * PAGES
        engine.backward(engine(batch_of(3)))
        assert not engine.runtime.executor.trace.deviant
        engine.step()
        assert bytes_read(engine) - before == (2 * 2 + 2 * 2 + 4 * 5 + 2) * PAGES


def test_frozen_groups_are_kept_although_others_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain(4)
    for block in model.blocks[:2]:
        block.weight.requires_grad_(False)
    with initialize(model, config=config(tmp_path, 4))[0] as engine:
        for index in range(2):
            step(engine, index)
        before = bytes_read(engine)
        step(engine)
        assert bytes_read(engine) - before == 2 * 5 * PAGES
        assert get_full(model.blocks[0].weight) is not None


def test_a_frozen_parameter_on_nvme_can_be_edited_and_a_checkpoint_keeps_the_edit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain(4)
    for block in model.blocks[:2]:
        block.weight.requires_grad_(False)
    first, second = (block.weight for block in model.blocks[:2])
    with initialize(model, config=config(tmp_path, 4))[0] as engine:
        step(engine)
        engine.save_checkpoint(tmp_path / "saved", tag="before")
        old, beside = get_full(first), get_full(second)
        assert old is not None
        assert beside is not None
        with GatheredParameters(first, modifier_rank=0), torch.no_grad():
            first.mul_(2)
        step(engine)
        assert torch.equal(get_full(first), old * 2)  # type: ignore[arg-type]
        assert torch.equal(get_full(second), beside)  # type: ignore[arg-type]
        engine.save_checkpoint(tmp_path / "saved", tag="after")
        loss = step(engine)
        set_full(first, "param", old * 3)
        assert step(engine) != loss
        engine.load_checkpoint(tmp_path / "saved", tag="after")
        assert torch.equal(get_full(first), old * 2)  # type: ignore[arg-type]
        assert step(engine) == loss
        engine.load_checkpoint(tmp_path / "saved", tag="before")
        assert torch.equal(get_full(first), old)  # type: ignore[arg-type]

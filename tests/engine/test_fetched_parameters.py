"""An update takes parameters from a group's fetched copy instead of reading them again: fewer bytes, the same numbers."""

import weakref
from pathlib import Path

import torch
from small_model import batch, build, bytes_read, differences, on_nvme, settings, train_with_engine
from torch import nn

from lamina.engine import initialize

STEPS = 5


def bytes_of_a_step(folder: Path, *, device_bytes: int | None) -> float:
    """Read from NVMe, on average, updated after the backward pass. What is read ahead counts to the step before."""
    more = {} if device_bytes is None else {"device_bytes": device_bytes}

    model = build(width=64, hidden=256, blocks=4, tied=False)
    config = settings(bf16={"enabled": True}, gradient_clipping=1.0, **on_nvme(folder, **more))
    engine, _, _, _ = initialize(model, config=config)
    with engine:
        after_first = 0
        for index in range(STEPS + 1):
            engine.backward(engine(*batch(index)))
            engine.step()
            after_first = after_first or bytes_read(engine)
        assert engine.metrics().link_bytes["host->nvme"] > 0
        return (bytes_read(engine) - after_first) / STEPS


def test_a_window_that_holds_everything_reads_each_parameter_once_and_never_for_the_update(tmp_path: Path) -> None:
    stored = sum(parameter.numel() for parameter in build(tied=False).parameters())
    # Fetched once (2 bytes each), then remainder and both moments (10): 12 instead of 14, and padding to pages.
    wide = bytes_of_a_step(tmp_path / "wide", device_bytes=None)
    assert wide < 13.2 * stored
    narrow = bytes_of_a_step(tmp_path / "narrow", device_bytes=70_000)
    assert narrow > wide + 2 * stored, "one group at a time is fetched for both passes and again for most updates"


def test_the_numbers_do_not_depend_on_where_the_parameters_are_taken_from(tmp_path: Path) -> None:
    common = {"bf16": {"enabled": True}, "gradient_clipping": 0.05}
    wide = train_with_engine(settings(**common, **on_nvme(tmp_path)), tied=False)
    narrow = train_with_engine(
        settings(**common, **on_nvme(tmp_path, device_bytes=140_000, host_bytes=3_000_000)), tied=False
    )
    in_memory = train_with_engine(settings(**common), tied=False)
    assert list(differences(wide, narrow)) == []
    assert list(differences(wide, in_memory)) == []


class Squashed(nn.Module):
    """Blocks whose backward pass needs their results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.results: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.results.append(weakref.ref(x))
        return x.square().mean()


def test_a_forward_pass_whose_loss_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Squashed()
    engine, _, _, _ = initialize(module, config=settings(gradient_clipping=0, **on_nvme(tmp_path)))
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 32)))
            engine.step()
        engine(torch.ones(2, 32)).item()
        assert [result() for result in module.results] == [None] * 12
        assert set(engine.runtime.state.saved.values()) == {0}

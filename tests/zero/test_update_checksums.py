"""The checksums that the update's own pass takes reach the store: no second pass over what it wrote, and right ones."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import batch, build, on_nvme, settings

from lamina.engine import initialize
from lamina.tiers import Transaction

# One block's planes are longer than a chunk of the store (1 MiB).
MODEL = {"blocks": 2, "hidden": 2112, "tied": False}


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(("groups", "sub_group_size"), [(1, 1_000_000_000), (2, 100_000)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_the_update_wrote_is_not_read_again_for_its_checksum(
    groups: int, precision: str, sub_group_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(**on_nvme(tmp_path, verify="always"))  # every later fetch is compared with the checksums
    config["zero_optimization"]["sub_group_size"] = sub_group_size
    if precision != "fp32":
        config[precision] = {"enabled": True}
    model = build(**MODEL)
    written = {"bytes": 0, "read": 0}
    commit = Transaction.commit

    def counting(self: Transaction, *arguments: Any, **options: Any) -> None:
        written["read"] += self.checksum_read_bytes
        commit(self, *arguments, **options)

    with initialize(model, model_parameters=two_groups(model) if groups == 2 else None, config=config)[0] as engine:
        monkeypatch.setattr(Transaction, "commit", counting)
        store = engine.runtime.store
        assert store is not None
        for index in range(3):
            engine.backward(engine(*batch(index, model.vocab)))
            engine.step()
        written["bytes"] = 3 * sum(
            spec.itemsize * segment.layout.shard_numel
            for segment in engine.runtime.segments
            for spec in segment.stored_planes
        )
    # A piece across the border of two chunks is read: at most one of 64 KiB at each border.
    assert written["read"] <= 0.1 * written["bytes"]
    if groups == 1 and sub_group_size > 1e6:
        assert written["read"] == 0

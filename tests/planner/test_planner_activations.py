"""Predicted bytes of one training pass against every byte that torch really holds, counted storage by
storage."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lamina.bench.training.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine.planner import (
    Case,
    Kind,
    ModelShape,
    Phase,
    Placement,
    Workload,
    footprint,
    machine_preset,
    shape_from_module,
)
from lamina.engine.planner.activations import activation_bytes, block_activation_bytes

COUNTED = (
    Kind.PARAMETERS,
    Kind.GRADIENTS,
    Kind.IN_FLIGHT,
    Kind.ACTIVATIONS,
    Kind.CHECKPOINTS,
    Kind.LOGITS,
)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that are alive, and their peak, while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


def measured_peak(model: GPT, tokens: torch.Tensor, *, checkpointing: bool) -> int:
    if checkpointing:
        model.blocks = Wrapped(model.blocks)
    with LiveBytes() as live:
        for parameter in model.parameters():
            live.add(parameter.data)
        model(tokens, tokens).backward()
    return live.peak


class Wrapped(torch.nn.ModuleList):
    """Runs every block under torch's own activation checkpointing."""

    def __iter__(self) -> Iterator[Any]:
        for block in super().__iter__():
            yield lambda x, block=block: checkpoint(block, x, use_reentrant=False)


SHAPE = GPTShape(layers=3, dim=64, heads=2, seq=1024)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("batch", "sequence"), [(1, 128), (8, 128), (1, 1024), pytest.param(8, 1024, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peak_of_a_pass_is_within_fifteen_percent(dtype: str, batch: int, sequence: int, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    shape = shape_from_module(model, name="gpt", heads=SHAPE.heads)
    load = Workload(micro_batch=batch, sequence=sequence, dtype=dtype, checkpoint_interval=1 if checkpointing else 0)
    # A GPU beside the host, where plain torch would keep everything on the device.
    held = footprint(Case(model=shape, load=load, place=Placement(stage=0), machine=machine_preset("rtx4090")))
    by_phase = [held.of("device", phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_END)]
    ours = max(sum(kinds.get(kind, 0) for kind in COUNTED) for kinds in by_phase)
    tokens = torch.randint(VOCABULARY, (batch, sequence))
    real = measured_peak(model, tokens, checkpointing=checkpointing)
    assert ours == pytest.approx(real, rel=0.15), f"ours {ours:,} real {real:,} ratio {ours / real:.3f}"


def test_block_equals_the_published_count_with_plain_attention() -> None:
    # 2 * b * s * (16 * hidden + 2 * heads * s) bytes in half precision; norm statistics are ours on top.
    model = ModelShape(name="gpt", layers=1, hidden=1024, heads=16)
    load = Workload(micro_batch=2, sequence=512, dtype="fp16", attention="plain")
    published = 2 * 2 * 512 * (16 * 1024 + 2 * 16 * 512)
    assert block_activation_bytes(model, load) - published == 2 * 512 * 4 * 4


def test_attention_scores_grow_with_the_square_of_the_sequence() -> None:
    model = ModelShape(name="gpt", layers=1, hidden=1024, heads=16)
    plain = [Workload(sequence=s, attention="plain") for s in (1024, 2048)]
    short, long = (activation_bytes(model, load).block for load in plain)
    flash = [activation_bytes(model, Workload(sequence=s)).block for s in (1024, 2048)]
    assert flash[1] == 2 * flash[0]
    assert long - 2 * short == 2 * 2 * 16 * (2048**2 - 2 * 1024**2)


def test_checkpoint_interval_trades_kept_for_recomputed() -> None:
    model = ModelShape(name="gpt", layers=8, hidden=512, heads=8)
    kept = [activation_bytes(model, Workload(checkpoint_interval=every)) for every in (1, 2, 4)]
    stream = 1024 * 512 * 2
    assert [acts.saved for acts in kept] == [8 * stream, 4 * stream, 2 * stream]
    assert [acts.working for acts in kept] == [every * kept[0].block for every in (1, 2, 4)]

"""The paths for an accelerator with memory of its own, run on a CPU that pretends to be one: same numbers as without."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from small_model import Outcome, batch, build, differences

from lamina.tiers import Budgets, NvmePath, Tier, Wishes
from lamina.tiers.memory.gpu import Accelerator
from lamina.zero import AdamDefaults, ZeroOptions, ZeroRuntime, get_full, set_full

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def train(
    folder: Path, param: Tier, state: Tier, *, accelerator: bool, accumulation: int = 1, **options: object
) -> Outcome:
    model = build()
    wishes = Wishes(
        param_tiers=(param,),
        state_tiers=(state,),
        separate_device=accelerator,
        in_place_tiers=(DEVICE,) if accelerator else (DEVICE, HOST),
        overlap_update=accumulation == 1,
        retain_gradients=True,
    )
    runtime = ZeroRuntime(
        model,
        model.parameters(),
        ZeroOptions(
            accelerator=Accelerator(torch.device("cpu")) if accelerator else None,
            wishes=wishes,
            nvme=[NvmePath(path=str(folder))],
            adam=AdamDefaults(weight_decay=0.1),
            grad_dtype=torch.float32 if accumulation > 1 else None,
            **options,  # type: ignore[arg-type]
        ),
    )
    losses = []
    try:
        assert runtime.optimizer is not None
        for step in range(3):
            for micro in range(accumulation):
                with runtime.forward_context():
                    loss = model(*batch(step * accumulation + micro))
                losses.append(loss.item())
                runtime.begin_backward(last_of_window=micro == accumulation - 1)
                with runtime.forward_context():
                    (loss / accumulation).backward()
                runtime.end_backward()
            runtime.optimizer.finish(step=step + 1)
            runtime.finish_step()
            first = next(model.parameters())
            set_full(first, "param", get_full(first, "master") * 1.5)  # an edit must reach every copy
        return losses, [get_full(parameter, "master") for parameter in model.parameters()]
    finally:
        runtime.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("param", "state"), [(DEVICE, HOST), (DEVICE, NVME), (HOST, HOST), (HOST, NVME), (NVME, NVME)])
def test_a_separate_device_gives_the_same_numbers(
    param: Tier, state: Tier, accumulation: int, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    there = train(tmp_path, param, state, accelerator=True, accumulation=accumulation, compute_dtype=dtype)
    shared = train(tmp_path, DEVICE, HOST, accelerator=False, accumulation=accumulation, compute_dtype=dtype)
    assert list(differences(there, shared)) == []


def test_a_small_window_and_few_fetch_buffers_wait_instead_of_failing(tmp_path: Path) -> None:
    tight = Budgets(device_bytes=140_000, host_bytes=3_500_000)
    there = train(tmp_path, NVME, NVME, accelerator=True, budgets=tight)
    shared = train(tmp_path, DEVICE, HOST, accelerator=False)
    assert list(differences(there, shared)) == []

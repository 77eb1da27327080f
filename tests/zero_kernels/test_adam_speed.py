"""The rate of streamed updates is measured on the very update that streams: every dtype's planes, with checksums."""

import pytest
import torch

from lamina.zero import Kernels
from lamina.zero.adam.speed import BUFFERS, NUMEL, ROUNDS, streamed_adam_rate


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_measured_with_its_checksums(
    dtype: torch.dtype, grad_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool, float]] = []
    plain = Kernels.adam

    def adam(self: Kernels, planes: object, hyper: object, grad_multiplier: float = 1.0) -> None:
        plain(self, planes, hyper, grad_multiplier)  # type: ignore[arg-type]
        seen.append((planes.n, planes.sums != 0, grad_multiplier))  # type: ignore[attr-defined]

    monkeypatch.setattr(Kernels, "adam", adam)
    with Kernels(1) as kernels:
        assert streamed_adam_rate(kernels, dtype, grad_dtype or dtype) > 0
    assert seen == [(NUMEL, True, 1.0)] * (BUFFERS * (ROUNDS + 1))

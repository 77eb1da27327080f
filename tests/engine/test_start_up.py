"""What a process that trains need not load."""

import subprocess
import sys
from pathlib import Path

import pytest

from lamina import engine as package

SCRIPT = """
import sys
import torch
from lamina.engine import initialize
from lamina.zero import CPUAdam

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": sys.argv[1]}},
}
with initialize(model=model, config=config)[0] as engine:
    engine.backward(engine(torch.ones(1, 16)).sum())
    engine.step()
own = [torch.nn.Parameter(torch.ones(16))]
optimizer = CPUAdam(own, lr=0.1)
own[0].sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
loaded = {name for name in ("torch._dynamo", "sympy", "matplotlib", "transformers", "rich") if name in sys.modules}
print(engine.global_steps, sorted(loaded))
"""


def test_training_loads_neither_a_compiler_nor_what_only_commands_need(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert child.stdout.split("\n")[-2:] == ["1 []", ""], child.stderr


def test_a_module_that_cannot_be_loaded_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_arguments: object) -> None:
        raise AttributeError("cffi library has no function, constant or global variable named 'LK_NEW'")

    monkeypatch.setattr(package.importlib, "import_module", stale)
    with pytest.raises(ImportError, match=r"lamina\.engine\.building cannot be loaded: .*LK_NEW"):
        package.__getattr__("initialize")

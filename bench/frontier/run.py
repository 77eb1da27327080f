"""One training run for `frontier`, in a process of its own: lamina, plain PyTorch or DeepSpeed. One line of JSON.

    PYTHON run.py '{"system": "torch", "shape": {...}, ...}'

Knows nothing of lamina but in lamina's own run, so that it also runs in an interpreter that has only the other system.
Memory is the peak of the whole run above what importing torch took. lamina's model is built under its Init, as a model that
memory cannot hold must be: built as usual, its fp32 values alone would be the peak of the small budgets.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

# Started by its path: the folder's other files must not be taken for the libraries whose names they share.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402

Build = Callable[[], torch.nn.Module]
BATCHES = 4
LOOKS = 5
"""How often the disk is looked at, before and after the measured steps."""
SEED = 7


def resident() -> tuple[int, int]:
    """Bytes of this process: now, and at its peak."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()
    return int(fields["VmRSS"][0]) * 1024, int(fields["VmHWM"][0]) * 1024


def age() -> float:
    """Seconds since this process was started, on the kernel's clock (10 ms steps)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class System(Protocol):
    """What trains the model."""

    def forward(self, *batch: torch.Tensor) -> torch.Tensor: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...

    def look_around(self) -> None:
        """Measure what this machine can do just now. Called once before the measured steps and once after them."""
        ...

    def close(self) -> dict[str, Any]:
        """End, and tell what only this system knows."""
        ...


class EngineSystem:
    """What has an engine of DeepSpeed's shape."""

    engine: Any

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.engine(*batch)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def look_around(self) -> None:
        pass


class Lamina(EngineSystem):
    """lamina's engine."""

    def __init__(self, job: dict[str, Any], build: Build) -> None:
        initialize = importlib.import_module("lamina.engine").initialize
        with importlib.import_module("lamina.zero").Init(config=job["config"]):
            model = build()
        self.engine = initialize(model=model, config=job["config"])[0]
        self.folders = job["config"].get("tiers", {}).get("nvme", [])
        self.metrics: deque[Any] = deque(maxlen=job["steps"])
        self.disk_s: list[float] = []
        """For each byte of such a step, by looking at the disk before and after them."""

    def step(self) -> None:
        super().step()
        self.metrics.append(self.engine.metrics())

    def look_around(self) -> None:
        """Of the disk: the bytes of the last step, each way."""
        read, written = (self.metrics[-1].link_bytes.get(link, 0) for link in ("nvme->host", "host->nvme"))
        if not self.folders or not read + written:
            return
        job = {"folder": self.folders[0], "read_bytes": read, "written_bytes": written, "rounds": LOOKS}
        command = [sys.executable, "-m", "lamina.bench.frontier.disk", json.dumps(job)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.disk_s += [seconds / (read + written) for seconds in json.loads(told)]

    def close(self) -> dict[str, Any]:
        """What only lamina tells: bytes of the tiers, and the lower bound of its steps: by the disk's rate as it was just before
        and after them, where it was used."""
        peaks = dict(self.engine.metrics().peak_bytes)
        self.engine.close()
        return {
            "tiers": peaks,
            "lower_bound_s": median(map(self._bound, self.metrics)),
            "disk_s_per_byte": self.disk_s,
        }

    def _bound(self, metrics: Any) -> float:
        costs = metrics.costs
        if self.disk_s:
            costs = costs.with_io_s(median(self.disk_s) * sum(metrics.link_bytes.values()))
        return float(costs.lower_bound_s)


class Torch:
    """Parameters in bf16, fp32 masters and fused AdamW, all in memory."""

    def __init__(self, job: dict[str, Any], build: Build) -> None:
        model = build()
        self.masters = [parameter.detach().float() for parameter in model.parameters()]
        self.model = model.to(torch.bfloat16)
        self.params: list[torch.Tensor] = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **job["adam"])

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.params, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)

    def look_around(self) -> None:
        pass

    def close(self) -> dict[str, Any]:
        return {}


class DeepSpeed(EngineSystem):
    """DeepSpeed's engine on one rank, with the config that the job brings."""

    def __init__(self, job: dict[str, Any], build: Build) -> None:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(job["port"]))):
            os.environ[name] = value
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        deepspeed = importlib.import_module("deepspeed")
        model = build().to(torch.bfloat16)
        config = json.loads(json.dumps(job["config"]))
        offload = config["zero_optimization"].get("offload_param", {})
        if offload.get("device") == "nvme":
            offload["buffer_size"] = max(parameter.numel() for parameter in model.parameters())
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def close(self) -> dict[str, Any]:
        return {}


SYSTEMS: dict[str, Callable[[dict[str, Any], Build], System]] = {
    "lamina": Lamina,
    "torch": Torch,
    "deepspeed": DeepSpeed,
}


def load_gpt(job: dict[str, Any]) -> torch.nn.Module:
    """The model, from its file: it needs nothing but torch."""
    spec = importlib.util.spec_from_file_location("frontier_gpt", job["gpt_file"])
    if spec is None or spec.loader is None:
        raise OSError(f"{job['gpt_file']}: cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["frontier_gpt"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: torch.nn.Module = module.GPT(module.GPTShape(**job["shape"]))
    return model


def batches(job: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same few batches of bytes for every system: next-byte pairs that can be learned."""
    generator = torch.Generator().manual_seed(SEED)
    size, seq = job["micro_batch"], job["shape"]["seq"]
    follows = torch.randperm(256, generator=generator)
    made = []
    for _ in range(BATCHES):
        columns = [torch.randint(256, (size,), generator=generator)]
        for _ in range(seq):
            columns.append(follows[columns[-1]])
        text = torch.stack(columns, 1)
        made.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return made


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train and take the medians of the steps after the warm-up."""
    imported, _ = resident()
    system = SYSTEMS[job["system"]](job, lambda: load_gpt(job))
    data = batches(job)
    rows, losses = [], []
    first_step_at = 0.0
    for index in range(job["warm_up"] + job["steps"]):
        # The step after it is not counted: while the disk is looked at, others' work ends.
        if 0 < index == job["warm_up"] - 1:
            system.look_around()
        start = time.perf_counter()
        loss = system.forward(*data[index % BATCHES])
        forward = time.perf_counter()
        system.backward(loss)
        backward = time.perf_counter()
        system.step()
        rows.append((forward - start, backward - forward, time.perf_counter() - backward))
        losses.append(float(loss.detach()))
        first_step_at = first_step_at or age()
    system.look_around()
    peak = resident()[1]
    kept = rows[job["warm_up"] :]
    return {
        "forward_s": median(row[0] for row in kept),
        "backward_s": median(row[1] for row in kept),
        "update_s": median(row[2] for row in kept),
        "step_s": median(sum(row) for row in kept),
        "first_step_at_s": first_step_at,  # since the start of the process
        "peak_bytes": peak - imported,
        "losses": losses,
        **system.close(),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without the other system's teardown, which may hang or complain

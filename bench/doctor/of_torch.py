"""Checks of torch: the build, GPUs by a transfer there and back, and the backends of several ranks by a collective."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lamina.bench.doctor.finding import Finding, State, first_line
from lamina.bench.report import format_bytes

SECTION = "torch"
INSTALL = "pip install 'torch>=2.6'"
LEAST = (2, 6)
DEVICE_BYTES = 4 << 20


def finding(name: str, state: State, text: str, mend: str = "") -> Finding:
    """A finding of this section."""
    return Finding(section=SECTION, name=name, state=state, text=text, mend=mend)


def check_build() -> Iterator[Finding]:
    """Version and threads; a matrix product as a sign of life."""
    import torch

    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < LEAST:
        yield finding("torch", State.FAIL, f"{version} is too old: 2.6 at least", INSTALL)
        return
    one = torch.full((8, 8), 0.5)
    if not torch.equal(one @ one, torch.full((8, 8), 2.0)):
        yield finding("torch", State.FAIL, f"{version} multiplies matrices wrongly", INSTALL)
        return
    yield finding("torch", State.OK, f"{version}, {torch.get_num_threads()} threads")


def check_gpus() -> Iterator[Finding]:
    """Each GPU: bytes to it and back."""
    import torch

    drivers = [path for path in ("/dev/nvidia0", "/dev/dxg") if os.path.exists(path)]
    if not torch.cuda.is_available():
        if drivers:
            text = f"a GPU is there ({drivers[0]}), but torch {torch.__version__} does not see it"
            built = "for CPUs only" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
            mend = "pip install torch --index-url https://download.pytorch.org/whl/cu126; nvidia-smi shows the driver's CUDA"
            yield finding("GPU", State.WARN, f"{text}; it was built {built}", mend)
        else:
            yield finding("GPU", State.INFO, "none: the device tier is host memory")
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        try:
            sent = torch.randint(256, (DEVICE_BYTES,), dtype=torch.uint8).pin_memory()
            back = sent.to(f"cuda:{index}").cpu()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            yield finding(
                f"GPU {index}", State.FAIL, f"{name}: {first_line(error)}", "nvidia-smi; sudo dmesg | grep -i nvrm"
            )
            continue
        if not torch.equal(sent, back):
            yield finding(f"GPU {index}", State.FAIL, f"{name}: other bytes came back than were sent", "nvidia-smi -q")
            continue
        text = f"{name}: {format_bytes(free)} of {format_bytes(total)} free; 4 MiB sent there and back"
        yield finding(f"GPU {index}", State.OK, text)


def check_ranks() -> Iterator[Finding]:
    """gloo by a collective of one rank; whether NCCL is built in."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield finding("ranks", State.WARN, "this torch has no torch.distributed: one rank only", INSTALL)
        return
    nccl = "NCCL is built in" if dist.is_nccl_available() else "no NCCL"
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield finding("ranks", State.WARN, "no NCCL: several GPUs would use gloo, which is slow", INSTALL)
    if not dist.is_gloo_available():
        yield finding("ranks", State.WARN, f"no gloo; {nccl}", INSTALL)
        return
    if dist.is_initialized():
        yield finding("ranks", State.OK, f"a process group is running ({dist.get_backend()}); {nccl}")
        return
    try:
        total = _collective()
    except RuntimeError as error:
        mend = "export GLOO_SOCKET_IFNAME=lo  # or the interface that the ranks share (ip -br addr)"
        yield finding("ranks", State.FAIL, f"gloo does not start: {first_line(error)}", mend)
        return
    right = total == 3.0
    yield finding("ranks", State.OK if right else State.FAIL, f"gloo {'works' if right else 'adds wrongly'}; {nccl}")


def _collective() -> float:
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(prefix="lamina-doctor-") as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            value = torch.full((1,), 3.0)
            dist.all_reduce(value)
            return float(value.item())
        finally:
            dist.destroy_process_group()

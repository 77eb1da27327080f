"""A config against this machine: is it right, and can it have what it asks for."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from lamina.aio_native import AsyncIO, BackendUnavailableError
from lamina.bench.doctor.finding import Finding, State
from lamina.bench.doctor.io import mend_backend
from lamina.bench.doctor.path import check_path
from lamina.bench.report import format_bytes
from lamina.engine.config import ConfigError, EngineConfig
from lamina.tiers.links.profile import DiskProfile, ProfileError
from lamina.tiers.links.profile_file import load_profile
from lamina.tiers.memory.limits import read_memory_limits

SECTION = "config"


def finding(name: str, state: State, text: str, mend: str = "") -> Finding:
    """A finding of this section."""
    return Finding(section=SECTION, name=name, state=state, text=text, mend=mend)


def check_config(file: Path) -> Iterator[Finding]:
    """Every problem of the file, then what it asks of memory, backend and disks.

    The number of ranks is that of the launcher (WORLD_SIZE), else one.
    """
    name = str(file)
    edit = f"edit {shlex.quote(name)}"
    world = os.environ.get("WORLD_SIZE", "1")
    try:
        config = EngineConfig.load(name, world_size=int(world) if world.isdigit() and int(world) > 0 else 1)
    except ConfigError as error:
        for problem in error.problems:
            yield finding(problem.path or name, State.FAIL, problem.message, edit)
        return
    except OSError as error:
        yield finding(name, State.FAIL, f"cannot be read: {error.strerror}", f"ls -l {shlex.quote(name)}")
        return
    yield finding(name, State.OK, f"understood; {config.compute_dtype}, {config.world_size} rank(s)")
    for hint in config.hints:
        yield finding("hint", State.INFO, hint)
    yield from _backend(config, edit)
    yield from _memory(config)
    yield from _device(config)
    paths = config.nvme_paths
    for entry in paths:
        yield from check_path(Path(entry.path), wanted_bytes=entry.bytes)
        yield from _tuning(config, Path(entry.path), edit)
    wants_nvme = "nvme" in str(list(config.placement().values()))
    if wants_nvme and not paths:
        yield finding("tiers.nvme", State.FAIL, "state is placed on nvme, but no folder is named", edit)


def _backend(config: EngineConfig, edit: str) -> Iterator[Finding]:
    wanted = config.tiers.io_backend
    try:
        with AsyncIO(backend=wanted, block_bytes=config.aio.block_size, queue_depth=config.aio.queue_depth) as io:
            yield finding("tiers.io_backend", State.OK, f"{wanted}: {io.backend} starts with this aio block")
    except BackendUnavailableError as error:
        mend = f'{mend_backend(error)}; or {edit}: tiers.io_backend "auto"'
        yield finding("tiers.io_backend", State.FAIL, str(error), mend)
    except ValueError as error:
        yield finding("aio", State.FAIL, str(error), edit)


def _memory(config: EngineConfig) -> Iterator[Finding]:
    allowed, why = read_memory_limits().allowance(locked=_page_locked(config))
    wanted = config.tiers.host_bytes
    if wanted is None:
        yield finding("tiers.host_bytes", State.OK, f"not given: {format_bytes(allowed)} may be taken ({why})")
        return
    fits = wanted <= allowed
    text = f"{format_bytes(wanted)} of {format_bytes(allowed)} that may be taken ({why})"
    yield finding(
        "tiers.host_bytes",
        State.OK if fits else State.FAIL,
        text if fits else f"{format_bytes(wanted)} wanted, {format_bytes(allowed)} may be taken ({why})",
        "" if fits else f"lower tiers.host_bytes to {allowed} or less, or raise that limit",
    )


def _page_locked(config: EngineConfig) -> bool:
    """Whether host memory will be: only where there is a GPU to copy to."""
    zero = config.zero_optimization
    if not (zero.offload_optimizer.pin_memory or zero.offload_param.pin_memory):
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _device(config: EngineConfig) -> Iterator[Finding]:
    """The budget of device memory against what the GPU has; without a GPU it comes out of host memory."""
    wanted = config.tiers.device_bytes
    if wanted is None:
        return
    import torch

    if torch.cuda.is_available():
        allowed, _ = torch.cuda.mem_get_info()
        what = "free on the GPU"
    else:
        allowed = read_memory_limits().allowance()[0] - (config.tiers.host_bytes or 0)
        what = "of host memory left beside tiers.host_bytes (no GPU)"
    fits = wanted <= allowed
    text = f"{format_bytes(wanted)} wanted, {format_bytes(max(0, allowed))} {what}"
    mend = "" if fits else f"lower tiers.device_bytes to {max(0, allowed)} or less"
    yield finding("tiers.device_bytes", State.OK if fits else State.FAIL, text, mend)


def _tuning(config: EngineConfig, path: Path, edit: str) -> Iterator[Finding]:
    """The aio block beside the one that was found best on this disk."""
    try:
        disk = load_profile([path]).disk(path)
    except ProfileError:
        return  # check_path tells
    if (config.aio.block_size, config.aio.queue_depth) != (disk.block_bytes, disk.queue_depth):
        yield finding("aio", State.INFO, f"{path} is faster with {_aio_words(disk)}", edit)


def _aio_words(disk: DiskProfile) -> str:
    return f"block_size {disk.block_bytes}, queue_depth {disk.queue_depth}"

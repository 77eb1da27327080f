"""Choosing the backend: asked once per AsyncIO, by starting the engine, never by looking at version numbers."""

import errno
from dataclasses import dataclass
from typing import Any, Literal

from .errors import AsyncIOError, BackendUnavailableError, errno_name
from .native import Native, load_threads, load_uring, uring_refusal

Backend = Literal["auto", "uring", "threads"]
BACKENDS = ("auto", "uring", "threads")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of an engine; each is described at AsyncIO."""

    queue_depth: int
    num_threads: int
    inline_bytes: int
    bounce_blocks: int
    bounce_block_bytes: int
    use_fixed: bool
    block_bytes: int
    max_inflight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running engine and why it is of this kind."""

    native: Native
    pointer: Any
    reason: str


def _start(native: Native, config: EngineConfig) -> tuple[Any, int]:
    """(engine or NULL, errno)."""
    settings = native.ffi.new("struct lamina_config *")
    settings.driver = native.driver
    settings.queue_depth = config.queue_depth
    settings.num_threads = config.num_threads
    settings.inline_bytes = config.inline_bytes
    settings.bounce_blocks = config.bounce_blocks
    settings.bounce_block_bytes = config.bounce_block_bytes
    settings.use_fixed = config.use_fixed
    settings.block_bytes = config.block_bytes
    settings.max_inflight_bytes = config.max_inflight_bytes
    error = native.ffi.new("int *")
    pointer = native.lib.lamina_engine_open(settings, error)
    return native.ffi.gc(pointer, native.lib.lamina_engine_free) if pointer else pointer, int(error[0])


def _start_uring(config: EngineConfig) -> Started:
    native = load_uring()
    pointer, number = _start(native, config)
    if not pointer:
        raise BackendUnavailableError(number, f"backend 'uring' cannot be used: {uring_refusal(number)}")
    return Started(native=native, pointer=pointer, reason="io_uring works here")


def _start_threads(config: EngineConfig, reason: str) -> Started:
    native = load_threads()
    pointer, number = _start(native, config)
    if not pointer:
        what = "no thread can be started (RLIMIT_NPROC?)" if number == errno.EAGAIN else "the engine did not start"
        raise AsyncIOError(number, f"backend 'threads': {what}: {errno_name(number)}")
    return Started(native=native, pointer=pointer, reason=reason)


def start(backend: Backend, config: EngineConfig) -> Started:
    """Starts the engine. Raises BackendUnavailableError when "uring" is asked for and cannot be had."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "threads":
        return _start_threads(config, "asked for")
    if backend == "uring":
        return _start_uring(config)
    try:
        return _start_uring(config)
    except BackendUnavailableError as error:
        return _start_threads(config, f"uring is not to be had: {error}")

"""The two native modules. The io_uring one is absent where liburing was when the package was built."""

import errno
import importlib
import os
from dataclasses import dataclass
from typing import Any

from .errors import BackendUnavailableError, errno_name

URING_PACKAGES = "liburing-dev and pkg-config (Debian, Ubuntu) or liburing-devel (Fedora)"
SYSCTL = "/proc/sys/kernel/io_uring_disabled"


@dataclass(frozen=True, kw_only=True)
class Native:
    """A native module: cffi's `ffi` and `lib`, and the number of the driver to ask it for."""

    name: str
    ffi: Any
    lib: Any
    driver: int


def load_threads() -> Native:
    """Raises BackendUnavailableError when the extension was not built."""
    try:
        module = importlib.import_module("lamina.aio_native._threads")
    except ImportError as error:
        raise BackendUnavailableError(
            errno.ENOSYS,
            f"lamina.aio_native._threads cannot be imported ({error}): the native code was not built. "
            "Install lamina with pip, or run `python setup.py build_ext --inplace` in a checkout (needs a C compiler)",
        ) from error
    return Native(name="threads", ffi=module.ffi, lib=module.lib, driver=module.lib.LAMINA_THREADS)


def load_uring() -> Native:
    """Raises BackendUnavailableError when the extension was not built."""
    try:
        module = importlib.import_module("lamina.aio_native._uring")
    except ImportError as error:
        raise BackendUnavailableError(
            errno.ENOSYS,
            f"lamina was built without its io_uring extension ({error}). "
            f"Install {URING_PACKAGES}, then build lamina again",
        ) from error
    return Native(name="uring", ffi=module.ffi, lib=module.lib, driver=module.lib.LAMINA_URING)


def sysctl_setting() -> str:
    """Value of kernel.io_uring_disabled, in words."""
    try:
        with open(SYSCTL, encoding="ascii") as file:
            value = file.read().strip()
    except OSError:
        return "kernel.io_uring_disabled does not exist here"
    return f"kernel.io_uring_disabled is {value}"


def uring_refusal(number: int) -> str:
    """Why a ring could not be made, and what to do about it."""
    what = f"io_uring_setup failed with {errno_name(number)}"
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            f"{what}: io_uring is forbidden or missing. Likely causes: a seccomp filter (the default profile of Docker, "
            f"Podman and others denies io_uring; run with a profile that allows io_uring_setup, io_uring_enter and "
            f"io_uring_register), the sysctl kernel.io_uring_disabled ({sysctl_setting()}; 0 allows all), "
            f"or a kernel older than 5.6 ({os.uname().release} runs here)"
        )
    if number == errno.ENOMEM:
        return f"{what}: not enough lockable memory for the ring. Raise RLIMIT_MEMLOCK (`ulimit -l`)"
    if number == errno.EINVAL:
        return f"{what}: the kernel knows none of the settings asked for; is it older than 5.6 ({os.uname().release})?"
    if number in (errno.EMFILE, errno.ENFILE):
        return f"{what}: no file descriptor left for the ring. Raise RLIMIT_NOFILE (`ulimit -n`)"
    return what

"""cffi build script of lamina.aio_native._uring: the engine with the io_uring driver. Needs liburing."""

import runpy
import subprocess
from pathlib import Path

# setup.py runs this file by its path, without a package around it.
threads = runpy.run_path(str(Path(__file__).resolve().parent / "_threads_build.py"))


def pkg_config(option: str, prefix: str) -> list[str]:
    words = subprocess.run(
        ["pkg-config", option, "liburing"], check=True, capture_output=True, text=True
    ).stdout.split()
    return [word.removeprefix(prefix) for word in words if word.startswith(prefix)]


ffibuilder = threads["builder"](
    "_uring",
    (*threads["NOUNS"], "ring_driver", "ring_slots", "time_slice"),
    define_macros=[("LAMINA_HAVE_URING", "1")],
    libraries=pkg_config("--libs-only-l", "-l"),
    library_dirs=pkg_config("--libs-only-L", "-L"),
)

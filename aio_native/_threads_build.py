"""cffi build script of lamina.aio_native._threads: the engine with the POSIX-threads driver, and CRC32C.

The public headers in csrc/ are the cdef: preprocessor lines are dropped, the rest is read as it stands.
"""

from pathlib import Path

from cffi import FFI

HEADERS = ("engine.h", "file.h", "transfer.h", "stats.h", "probe.h", "crc32c.h")
NOUNS = (
    "engine",
    "file",
    "transfer",
    "stats",
    "schedule",
    "piece",
    "bounce",
    "pool",
    "thread_driver",
    "probe",
    "crc32c",
)
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


def folder() -> Path:
    """The csrc folder, relative to the directory that setup.py runs in (setuptools wants relative sources)."""
    return (Path(__file__).resolve().parent / "csrc").relative_to(Path.cwd())


def cdef() -> str:
    text = "\n".join((folder() / header).read_text() for header in HEADERS)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def builder(module: str, nouns: tuple[str, ...], **options: list[str]) -> FFI:
    """An FFI whose extension is made of csrc/<noun>.c; options go to the compiler's Extension."""
    ffi = FFI()
    ffi.cdef(cdef())
    ffi.set_source(
        f"lamina.aio_native.{module}",
        "\n".join(f'#include "{header}"' for header in HEADERS),
        sources=[str(folder() / f"{noun}.c") for noun in nouns],
        depends=[str(path) for path in sorted(folder().glob("*.h"))],
        include_dirs=[str(folder())],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
        **options,
    )
    return ffi


ffibuilder = builder("_threads", NOUNS)

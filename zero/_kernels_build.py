"""cffi build script of lamina.zero._kernels: plain C, paths chosen at run time, no GPU toolkit needed.

The header is both the C interface and cffi's declarations: preprocessor lines are dropped, the rest is read
as it stands.
"""

from pathlib import Path

from cffi import FFI

# Relative to the checkout, where setup.py runs: an sdist keeps these paths too.
CSRC = Path("zero") / "csrc"
CRC = Path("aio_native") / "csrc"  # its CRC32C is taken here too, in the pass that writes
HERE = Path(__file__).resolve().parent / "csrc" if "__file__" in globals() else CSRC.resolve()
SOURCES = ["kernels.c", "pool.c", "team.c", "path_portable.c", "path_avx2.c", "path_avx512.c", "path_neon.c"]


def declarations(header: Path) -> str:
    return "\n".join(line for line in header.read_text().splitlines() if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations(HERE / "kernels.h"))
ffibuilder.set_source(
    "lamina.zero._kernels",
    '#include "kernels.h"',
    sources=[*(str(CSRC / name) for name in SOURCES), str(CRC / "crc32c.c")],
    depends=[
        str(CSRC / name)
        for name in ("kernels.h", "ops.h", "body.h", "pool.h", "team.h", "patience.h", "half.h", "fpenv.h")
    ],
    include_dirs=[str(CSRC), str(CRC)],
    libraries=["m", "dl"],
    # Only explicit multiply-adds may fuse: every path must give the same bits. Planes are bytes whose type the
    # caller names at run time, and tails go through a buffer of another type.
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-pthread",
        "-g1",
    ],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

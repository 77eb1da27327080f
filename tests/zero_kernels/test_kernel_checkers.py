"""The C kernels under sanitizers and valgrind, on another architecture, and built beside a broken GPU toolkit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.zero.adam.kernels import available_paths

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "zero" / "csrc"
CRC = ROOT / "aio_native" / "csrc"
DRIVER = Path(__file__).with_name("driver.c")
NUMBERS = {"portable": "0", "avx2": "1", "avx512": "2", "neon": "3"}
FLAGS = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-pthread"]
STRICT = ["-Wall", "-Wextra", "-Werror"]


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "runtime error" not in done.stderr, done.stderr
    return done.stdout


def build(compiler: str, out: Path, *flags: str) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    sources = [str(p) for p in [DRIVER, *sorted(CSRC.glob("*.c")), CRC / "crc32c.c"]]
    run([compiler, *FLAGS, *STRICT, *flags, f"-I{CSRC}", f"-I{CRC}", *sources, "-lm", "-o", str(out)])
    return out


def checksums(output: str) -> set[str]:
    return {line for line in output.splitlines() if line.startswith("checksum")}


def paths() -> list[str]:
    return [NUMBERS[p] for p in available_paths()]


@pytest.mark.slow  # builds the kernels once more
@pytest.mark.timeout(600)
def test_all_paths_have_one_checksum(tmp_path):
    driver = build("gcc", tmp_path / "driver", "-O2")
    assert len(checksums(run([str(driver), *paths()]))) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # checks in every inlined loop: the build takes minutes
@pytest.mark.parametrize("kind", ["undefined,address", "thread"])
def test_clean_under_sanitizers(tmp_path, kind):
    driver = build("gcc", tmp_path / "driver", "-O1", "-g", f"-fsanitize={kind}", "-fno-sanitize-recover=all")
    assert len(checksums(run([str(driver), *paths()]))) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clean_under_valgrind(tmp_path):
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    driver = build("gcc", tmp_path / "driver", "-O2", "-g")
    known = [n for p, n in NUMBERS.items() if p in available_paths() and p != "avx512"]  # valgrind has no AVX-512
    out = run(["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", str(driver), *known], timeout=550)
    assert checksums(out) == checksums(run([str(driver), *paths()]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_neon_gives_the_bits_of_this_machine(tmp_path):
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 (qemu-user) is not installed")
    other = build("aarch64-linux-gnu-gcc", tmp_path / "other", "-O2", "-static")
    here = build("gcc", tmp_path / "here", "-O2")
    neon = run(["qemu-aarch64", str(other), "0", "3"], timeout=550)
    assert checksums(neon) == checksums(run([str(here), *paths()]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("toolkit", ["none", "fake nvcc", "CUDA_HOME nowhere"])
def test_builds_without_regard_to_a_gpu_toolkit(tmp_path, toolkit):
    """G-01: no toolkit, an nvcc of another version first in PATH, CUDA_HOME set to nowhere."""
    for name in ("zero/csrc", "zero/_kernels_build.py", "aio_native/csrc"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    (tmp_path / "build_only.py").write_text(
        "from setuptools import setup\nsetup(name='x', cffi_modules=['zero/_kernels_build.py:ffibuilder'])\n"
    )
    env = dict(os.environ)
    env.pop("CUDA_HOME", None)
    if toolkit == "fake nvcc":
        (tmp_path / "nvcc").write_text("#!/bin/sh\necho release 1.0\nexit 1\n")
        (tmp_path / "nvcc").chmod(0o755)
        env["PATH"] = f"{tmp_path}:{env['PATH']}"
    elif toolkit == "CUDA_HOME nowhere":
        env["CUDA_HOME"] = "/nowhere"
    out = tmp_path / "out"
    run([sys.executable, "build_only.py", "-q", "build_ext", "-b", str(out)], cwd=tmp_path, env=env)
    assert list(out.rglob("_kernels*.so"))


@pytest.mark.slow
def test_a_broken_compiler_is_named_first(tmp_path):
    """G-01: what is shown is the compiler's own error."""
    (tmp_path / "zero").mkdir()
    shutil.copytree(CSRC, tmp_path / "zero" / "csrc")
    shutil.copytree(CRC, tmp_path / "aio_native" / "csrc")
    shutil.copy(ROOT / "zero" / "_kernels_build.py", tmp_path / "zero")
    (tmp_path / "zero" / "csrc" / "pool.c").write_text("#error deliberately broken\n")
    (tmp_path / "build_only.py").write_text(
        "from setuptools import setup\nsetup(name='x', cffi_modules=['zero/_kernels_build.py:ffibuilder'])\n"
    )
    done = subprocess.run(
        [sys.executable, "build_only.py", "-q", "build_ext", "-b", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
    assert "deliberately broken" in errors[0]

"""The C code under the compiler's sanitizers: threads, faults and cancels against a model (csrc/exercise.c)."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "aio_native" / "csrc"
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all"]
WRAP = ["-Wl,--wrap=pread,--wrap=pwrite,--wrap=io_uring_peek_batch_cqe"]


def build(folder: Path, sanitizers: str) -> tuple[Path, list[str]]:
    """(program, drivers in it); skips where the compiler or the sanitizer is missing."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    has_ring = Path("/usr/include/liburing.h").exists()
    sources = [str(path) for path in sorted(SOURCES.glob("*.c")) if has_ring or not path.stem.startswith("ring_")]
    ring = ["-DLAMINA_HAVE_URING"] if has_ring else []
    program = folder / "exercise"
    command = [compiler, *FLAGS, f"-fsanitize={sanitizers}", *ring, f"-I{SOURCES}", *WRAP, *sources]
    command += [str(HERE / "csrc" / "exercise.c"), "-o", str(program), "-pthread", *(["-luring"] if has_ring else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"the compiler's {sanitizers} sanitizer is not installed")
    assert done.returncode == 0, done.stderr
    return program, ["threads", "uring"] if has_ring else ["threads"]


def exercise(folder: Path, sanitizers: str, seconds: float, seed: int) -> None:
    program, drivers = build(folder, sanitizers)
    for driver in drivers:
        for faults in ("0", "1"):
            command = [str(program), driver, str(folder / "file.bin"), str(seconds), str(seed), faults]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if driver == "uring" and "engine (errno" in done.stderr:
                continue  # io_uring is forbidden here
            assert done.returncode == 0, f"{driver}, faults {faults}:\n{done.stdout}{done.stderr[-4000:]}"
            assert int(done.stdout.split()[0]) > 10, done.stdout


def test_the_engine_is_clean_under_address_and_undefined(tmp_path: Path) -> None:
    exercise(tmp_path, "address,undefined", 0.7, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_engine_is_clean_for_longer(tmp_path: Path, sanitizers: str, seed: int) -> None:
    exercise(tmp_path, sanitizers, 20, seed)

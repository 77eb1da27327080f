"""Kernels without some features of io_uring, played by a preloaded library: each fall-back works and is told."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.aio_native import AsyncIO, BackendUnavailableError

HERE = Path(__file__).parent
CLAMP, SUBMIT_ALL, COOP_TASKRUN, SINGLE_ISSUER, DEFER_TASKRUN = 1 << 4, 1 << 7, 1 << 8, 1 << 12, 1 << 13

CHILD = """
import json, os, random, sys, warnings
from lamina.aio_native import AlignedBuffer, AsyncIO, BufferedIOWarning, backend_report
data, back = os.urandom(3_000_017), bytearray(3_000_017)
with warnings.catch_warnings(record=True) as seen, AsyncIO() as io, AlignedBuffer(4 << 20) as buffer:
    warnings.simplefilter("always")
    warnings.simplefilter("ignore", BufferedIOWarning)
    registered = io.register(buffer.view)
    buffer.view[:len(data)] = data
    with io.open(sys.argv[1] + "/file", create=True) as file:
        handles = [io.write(file, buffer.view[:1 << 20], 0), io.write(file, buffer.view[1 << 20:len(data)], 1 << 20)]
        for handle in handles:
            handle.wait()
        io.fsync(file).wait()
        io.read(file, back).wait()
    told = {"backend": io.backend, "reason": io.backend_reason, "registered": registered, "equal": back == data,
            "warnings": [str(one.message) for one in seen]}
report = backend_report()
print(json.dumps(told | {"report": report.as_dict(), "text": str(report)}))
"""


@pytest.fixture(scope="module")
def old_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/liburing.h").exists():
        pytest.skip("no C compiler or no liburing.h")
    try:
        AsyncIO(backend="uring").close()
    except BackendUnavailableError as error:
        pytest.skip(f"this kernel grants no ring at all: {error}")
    library = tmp_path_factory.mktemp("preload") / "old_kernel.so"
    source = str(HERE / "csrc" / "old_kernel.c")
    command = [compiler, "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", str(library)]
    # Linked, or the real functions are not found: extensions are loaded apart from the program.
    subprocess.run([*command, "-Wl,--no-as-needed", "-luring", "-ldl"], check=True)
    return library


def run(library: Path, folder: Path, **settings: str) -> dict[str, Any]:
    environment = os.environ | {"LD_PRELOAD": str(library)} | settings
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["equal"]
    return told


@pytest.mark.parametrize(
    ("refused", "left", "named"),
    [
        (SINGLE_ISSUER, ["CLAMP", "SUBMIT_ALL", "COOP_TASKRUN"], {"SINGLE_ISSUER", "DEFER_TASKRUN"}),
        (DEFER_TASKRUN, ["CLAMP", "SUBMIT_ALL", "COOP_TASKRUN"], {"SINGLE_ISSUER", "DEFER_TASKRUN"}),
        (COOP_TASKRUN | DEFER_TASKRUN, ["CLAMP"], {"SUBMIT_ALL", "COOP_TASKRUN", "SINGLE_ISSUER", "DEFER_TASKRUN"}),
        (SUBMIT_ALL, ["CLAMP"], {"SUBMIT_ALL", "COOP_TASKRUN", "SINGLE_ISSUER", "DEFER_TASKRUN"}),
    ],
)
def test_refused_setup_flags_lead_to_a_plainer_ring_and_are_told(
    old_kernel: Path, tmp_path: Path, refused: int, left: list[str], named: set[str]
) -> None:
    told = run(old_kernel, tmp_path, OLD_KERNEL_FLAGS=str(refused))
    assert told["backend"] == "uring"
    assert told["report"]["setup_flags"] == left
    assert set(told["report"]["refused_flags"]) == named
    assert "refused by the kernel: " in told["text"]
    assert told["registered"]


def test_a_kernel_without_any_of_the_settings_leads_to_threads(old_kernel: Path, tmp_path: Path) -> None:
    told = run(old_kernel, tmp_path, OLD_KERNEL_FLAGS=str(CLAMP))
    assert told["backend"] == "threads"
    assert "EINVAL" in told["reason"]
    assert "older than 5.6" in told["reason"]


def test_without_tables_for_files_and_buffers_everything_goes_on_unregistered(old_kernel: Path, tmp_path: Path) -> None:
    told = run(old_kernel, tmp_path, OLD_KERNEL_SLOTS="1")
    assert told["backend"] == "uring"
    assert not told["registered"]
    assert not told["report"]["fixed_files"]
    assert not told["report"]["fixed_buffers"]
    assert "files no, buffers no; the kernel refused with EINVAL" in told["text"]
    assert len(told["warnings"]) == 1
    assert "5.19" in told["warnings"][0]
    assert "RLIMIT_MEMLOCK" not in told["warnings"][0]


def test_a_new_kernel_refuses_nothing(old_kernel: Path, tmp_path: Path) -> None:
    told = run(old_kernel, tmp_path)
    report = told["report"]
    assert not set(report["setup_flags"]) & set(report["refused_flags"])
    assert ("refused" in told["text"]) == bool(report["refused_flags"] or report["fixed_refusal"])

"""Which backend is chosen, what is said about it, and that a machine that forbids io_uring loses nothing else."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.aio_native import AsyncIO, BackendUnavailableError, backend_report

HERE = Path(__file__).parent
BAN = str(HERE / "ring_ban.py")

CHILD = """
import errno, json, sys
from lamina.aio_native import AsyncIO, BackendUnavailableError, backend_report
io = AsyncIO(backend="auto")
try:
    AsyncIO(backend="uring")
    refusal = None
except BackendUnavailableError as error:
    refusal = [error.errno, str(error)]
print(json.dumps({"backend": io.backend, "reason": io.backend_reason, "refusal": refusal,
                  "report": str(backend_report(sys.argv[1]))}))
io.close()
"""


def banned(number: str, *arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BAN, number, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("number", ["EPERM", "ENOSYS"])
def test_a_seccomp_filter_leads_to_threads_and_a_reason(number: str, tmp_path: Path) -> None:
    #
    done = banned(number, "-c", CHILD, str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["backend"] == "threads"
    assert told["refusal"][0] == (errno.ENOSYS if number == "ENOSYS" else errno.EPERM)
    for text in (told["reason"], told["refusal"][1], told["report"]):
        assert number in text
        assert "seccomp" in text
        assert "kernel.io_uring_disabled" in text


@pytest.mark.parametrize(
    ("number", "choice"),
    [
        ("EPERM", "random_pieces or neighbours or vectored"),
        pytest.param("EPERM", "", marks=pytest.mark.slow),
        pytest.param("ENOSYS", "", marks=pytest.mark.slow),
    ],
)
def test_the_tests_pass_under_a_seccomp_filter(number: str, choice: str, tmp_path: Path) -> None:
    names = ["transfers"] if choice else ["transfers", "failures", "scheduling", "model", "opening"]
    tests = [str(HERE / f"test_aio_{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}", "-k", choice]
    done = banned(number, "-m", "pytest", *options, *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout  # the uring half
    assert "passed" in done.stdout


def test_without_the_extension_the_package_to_install_is_named() -> None:
    # G-03: as when liburing was missing at build time.
    code = (
        "import sys; sys.modules['lamina.aio_native._uring'] = None\n"
        "from lamina.aio_native import AsyncIO, BackendUnavailableError\n"
        "io = AsyncIO(); print(io.backend, io.backend_reason); io.close()\n"
        "try: AsyncIO(backend='uring')\n"
        "except BackendUnavailableError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("threads")
    assert "liburing-dev" in first
    assert "liburing-dev" in second


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="uring, threads"):
        AsyncIO(backend="libaio")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("block_bytes", 4097),
        ("block_bytes", 0),
        ("queue_depth", 0),
        ("num_threads", 0),
        ("max_inflight_bytes", 0),
    ],
)
def test_impossible_settings_are_named(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting} must .* {value}"):
        AsyncIO(**{setting: value})  # type: ignore[arg-type]


def test_the_report_is_printable_and_data(tmp_path: Path) -> None:
    report = backend_report(tmp_path)
    data = report.as_dict()
    assert json.loads(json.dumps(data))["backend"] == report.backend in ("uring", "threads")
    assert report.path is not None
    assert report.path.alignment == (1 if not report.path.direct else data["path"]["alignment"])
    assert str(tmp_path) in str(report)
    assert os.listdir(tmp_path) == []  # the probe file is gone


@pytest.mark.uring
def test_uring_is_what_auto_takes_where_it_works() -> None:
    try:
        with AsyncIO(backend="uring") as io:
            assert io.features()["kernel_flags"] > 0
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with AsyncIO() as io:
        assert io.backend == "uring"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_liburing_the_threads_backend_alone_is_built(tmp_path: Path) -> None:
    root = HERE.parents[1]
    environment = os.environ | {"PKG_CONFIG_LIBDIR": str(tmp_path), "PKG_CONFIG_PATH": ""}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "apt-get install liburing-dev" in done.stderr
    assert not list(tmp_path.rglob("_uring*.so"))
    assert list(tmp_path.rglob("_threads*.so"))
    environment["LAMINA_REQUIRE_URING"] = "1"
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "liburing >= 2.3 was not found" in done.stderr

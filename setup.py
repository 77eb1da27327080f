"""Native extensions only: everything else is in pyproject.toml (cffi_modules has no spelling there)."""

import os
import subprocess
import sys

from setuptools import setup


def has_liburing() -> bool:
    try:
        return subprocess.run(["pkg-config", "--exists", "liburing >= 2.3"], check=False).returncode == 0
    except FileNotFoundError:
        return False


modules = ["aio_native/_threads_build.py:ffibuilder", "zero/_kernels_build.py:ffibuilder"]
if has_liburing():
    modules.append("aio_native/_uring_build.py:ffibuilder")
elif os.environ.get("LAMINA_REQUIRE_URING") == "1":
    sys.exit("LAMINA_REQUIRE_URING=1 but liburing >= 2.3 was not found: apt-get install liburing-dev pkg-config")
else:
    print(
        "lamina: liburing >= 2.3 not found (apt-get install liburing-dev pkg-config): threads backend only",
        file=sys.stderr,
    )

setup(cffi_modules=modules)

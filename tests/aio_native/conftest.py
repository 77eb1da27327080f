"""Fixtures of the file I/O tests: everything runs on every backend that this machine allows."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina.aio_native import AsyncIO, BackendUnavailableError


def usable_backends() -> list[str]:
    try:
        AsyncIO(backend="uring").close()
    except BackendUnavailableError:
        return ["threads"]
    return ["uring", "threads"]


USABLE = usable_backends()


@pytest.fixture(params=["uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; one that the machine forbids is skipped with a word."""
    if request.param not in USABLE:
        pytest.skip(f"backend {request.param} cannot be used on this machine")
    return str(request.param)


@pytest.fixture
def make_io(backend: str) -> Iterator[Callable[..., AsyncIO]]:
    """Opens AsyncIOs of the backend under test and closes them at the end."""
    opened: list[AsyncIO] = []

    def make(**settings: object) -> AsyncIO:
        opened.append(AsyncIO(backend=backend, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for io in opened:
        io.close(cancel=True)


@pytest.fixture
def io(make_io: Callable[..., AsyncIO]) -> AsyncIO:
    return make_io()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.bin"

"""A native I/O engine and small stores for the tests of the storage half of the tiers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_samples import CHUNK, SHARDS

from lamina.aio_native import AsyncIO
from lamina.tiers.nvme.store import GenerationStore
from lamina.tiers.tier import NvmePath


@pytest.fixture(scope="session")
def io() -> Iterator[AsyncIO]:
    """One engine for all tests."""
    with AsyncIO(queue_depth=8) as engine:
        yield engine


@pytest.fixture
def open_store(tmp_path: Path, io: AsyncIO) -> Iterator[Callable[..., GenerationStore]]:
    """Opens stores under tmp_path/nvme and closes them after the test."""
    opened: list[GenerationStore] = []

    def open_one(paths: Sequence[NvmePath] | None = None, **options: Any) -> GenerationStore:
        settings: dict[str, Any] = {"job": "job", "rank": 0, "shards": SHARDS, "io": io, "chunk_bytes": CHUNK}
        store = GenerationStore.open(paths or [NvmePath(path=str(tmp_path / "nvme"))], **(settings | options))
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()

"""Scratch space over several paths: every byte comes back, each path has its share, and no name is left."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina.aio_native import AsyncIO
from lamina.tiers.nvme.folder import RankFolder
from lamina.tiers.nvme.scratch import PIECE_BYTES, Scratch


def scratch(root: Path, io: AsyncIO, weights: list[float], nbytes: int) -> Scratch:
    folders = [RankFolder(str(root / str(i)), job="job", rank=0, key=f"path {i}") for i in range(len(weights))]
    return Scratch(folders, weights, io, nbytes)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.sampled_from([[1.0], [1.0, 1.0], [3.0, 1.0, 2.0], [0.0, 1.0], [1.0, 0.01]]),
    sizes=st.lists(st.integers(0, 3 * PIECE_BYTES), min_size=1, max_size=4),
)
def test_everything_comes_back(tmp_path: Path, weights: list[float], sizes: list[int]) -> None:
    starts = [sum(-(-size // 4096) * 4096 for size in sizes[:index]) for index in range(len(sizes) + 1)]
    with AsyncIO() as io:
        space = scratch(tmp_path, io, weights, starts[-1])
        wanted = [os.urandom(size) for size in sizes]
        writes = [space.start_write(start, memoryview(data)) for start, data in zip(starts, wanted, strict=False)]
        for handle in writes:
            handle.wait()
        for start, data in zip(starts, wanted, strict=False):
            found = bytearray(len(data))
            space.start_read(start, memoryview(found)).wait()
            assert bytes(found) == data
        assert not list(tmp_path.rglob("*.bin"))
        space.close()


def test_every_path_has_its_share(tmp_path: Path) -> None:
    with AsyncIO() as io:
        space = scratch(tmp_path, io, [3.0, 1.0], 16 * PIECE_BYTES + 4096)
        sizes = [file.size for file in space._files.values()]
        assert sizes == [12 * PIECE_BYTES + 4096, 4 * PIECE_BYTES]
        space.close()


def test_what_lies_beyond_the_end_is_refused(tmp_path: Path) -> None:
    with AsyncIO() as io:
        space = scratch(tmp_path, io, [1.0], 8192)
        with pytest.raises(ValueError, match="bytes 4096 to 12288 of 8192"):
            space.start_read(4096, memoryview(bytearray(8192)))
        space.close()

"""Memory of each rank at stage 3: what is shared out falls as 1/N, what passes by is a few groups (cases B-04 and B-05)."""

import json
import os
from pathlib import Path

import pytest
from launch import run_ranks
from peak_rank_script import BLOCK_BYTES, BLOCKS, BUCKETS, WINDOW

SCRIPT = Path(__file__).with_name("peak_rank_script.py")
TOTAL = BLOCKS * BLOCK_BYTES
PLANES = 4  # parameters, two moments, gradients
SLACK = 10 << 20  # activations, objects, pages of code, gloo's own buffers


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_peaks_of_every_rank(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else glibc keeps freed blocks of up to 32 MiB, cut by small ones, and the figures are a matter of luck.
    monkeypatch.setitem(os.environ, "MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    ran = run_ranks(SCRIPT, world_size, tmp_path, timeout=110)
    assert ran.returncode == 0, ran.stderr[-3000:]
    share = TOTAL // world_size
    for rank in range(world_size):
        found = json.loads((tmp_path / str(rank)).read_text())
        passing = (WINDOW + BUCKETS) * BLOCK_BYTES if world_size > 1 else 0  # alone, the host's copy is used as it lies
        # By the arenas' own count: shards fall as 1/N, and the device tier has the window and the buckets.
        assert found["host"] == pytest.approx(PLANES * share, rel=0.02), found
        assert found["device"] <= passing * 1.02, found
        assert found["device"] >= min(passing, 2 * BLOCK_BYTES), found
        # By the kernel's count.
        largest = BLOCK_BYTES
        assert found["build"] < share + 2 * largest + SLACK, found
        assert found["initialize"] < (PLANES + 1) * share + passing + 2 * largest + SLACK, found
        # What others send of the sums under way, and the copies that gloo makes of it.
        received = 4 * BLOCK_BYTES if world_size > 1 else 0
        assert found["train"] < PLANES * share + passing + received + largest + SLACK, found
        # B-05: no rank reads what the others saved.
        assert found["load"] <= 1.3 * found["train"], found
        assert found["save"] <= 1.3 * found["train"], found

"""How the kernel threads share out a job's chunks, wait awake for the next job and fall asleep: patience.h, pool.c."""

import ctypes
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from planes import adam_planes, bits, random_planes, run_adam

from lamina.zero.adam.kernels import AdamBatch, AdamHyper, AdamScalars, DType, Kernels

HYPER = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)
CSRC = Path(__file__).parents[2] / "zero" / "csrc"
PLAIN_CHUNK = 65536  # of kernels.c
ADAM_CHUNK = 16384
US = 1000  # ns

PATIENCE = """
#include "patience.h"
uint32_t with(uint32_t gaps, int64_t gap_ns) { return lk_gaps_with(gaps, gap_ns); }
int64_t patience(uint32_t gaps) { return lk_patience_ns(gaps); }
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """patience_ns after gaps of so many ns, as the header has it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("patience")
    (folder / "patience.c").write_text(PATIENCE)
    library = folder / "patience.so"
    command = ["gcc", "-std=c11", "-shared", "-fPIC", f"-I{CSRC}", str(folder / "patience.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    c = ctypes.CDLL(str(library))
    c.with_ = c["with"]
    c.with_.argtypes = [ctypes.c_uint32, ctypes.c_int64]
    c.with_.restype = ctypes.c_uint32
    c.patience.restype = ctypes.c_int64

    def patience_after(*gaps_ns: int) -> int:
        gaps = 0
        for gap in gaps_ns:
            gaps = c.with_(gaps, gap)
        return c.patience(gaps)

    return patience_after


def test_patience_follows_the_last_gaps(policy):
    short, long = 100 * US, 30_000 * US
    brief = policy()
    assert brief <= 20 * US  # nothing known: the cores belong to others
    assert policy(long) == policy(*[long] * 50) == brief
    assert policy(short) > short  # comes soon again
    assert policy(short, long) == policy(*[long, short] * 20, long) == policy(short)  # norm and update, then a pause
    assert policy(*[short] * 50, *[long] * 4) == brief  # forgotten
    assert policy(policy(short)) == brief  # a gap as long as the patience would not have been bridged


def test_patience_never_burns_a_core_for_long(policy):
    chance = random.Random(1)
    for _ in range(200):
        gaps = [chance.choice([0, 10 * US, 10**6, 10**12]) for _ in range(chance.randrange(40))]
        assert policy(*gaps) <= 200 * US


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("bound", [False, True])
def test_every_chunk_is_done_once(num_threads, bound):
    cores = [min(os.sched_getaffinity(0))] * num_threads if bound else None
    with Kernels(num_threads, cores=cores) as kernels:
        for chunks in (1, 2, 3, 4, 5, 7, 11):
            n = chunks * PLAIN_CHUNK - 5
            count, ones = torch.zeros(n), torch.ones(n)
            for _ in range(3):
                kernels.accumulate(n, dst=count.data_ptr(), src=ones.data_ptr(), src_dtype=DType.FP32)
            assert (count == 3).all(), chunks


def test_pauses_between_jobs_lose_nothing():
    """Several callers with pauses around every limit of the patience."""
    wanted = random_planes("split", DType.BF16, 5 * ADAM_CHUNK + 7, seed=1)
    start = wanted.copy()
    with Kernels(3) as kernels:
        run_adam(kernels, wanted, HYPER)
        failures: list[int] = []

        def work(name: int) -> None:
            chance = random.Random(name)
            batch = AdamBatch()
            for _ in range(60):
                mine = start.copy()
                batch.clear()
                batch.add(adam_planes(mine), AdamScalars(HYPER))
                time.sleep(chance.choice([0, 0, 10e-6, 100e-6, 500e-6, 2e-3]))
                if chance.random() < 0.8:
                    kernels.adam_batch(batch)
                    if not torch.equal(bits(mine.param), bits(wanted.param)):
                        failures.append(name)

        callers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert failures == []


def test_threads_without_a_job_fall_asleep_again():
    planes = random_planes("fp32", DType.FP32, 4 * ADAM_CHUNK, seed=1)
    batch = AdamBatch()
    batch.add(adam_planes(planes), AdamScalars(HYPER))
    with Kernels(4) as kernels:
        for _ in range(6):
            kernels.adam_batch(batch)  # in quick succession: patience is at its longest
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1

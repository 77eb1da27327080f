"""Ranks on two hosts, each with an NVMe path of its own, train as the same ranks on one host do."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from safetensors.torch import load_file
from two_hosts import ADDRESSES, NotAllowed, two_hosts

SCRIPT = Path(__file__).with_name("host_rank_script.py")
RANKS_PER_HOST = 2
TIMEOUT_S = 100


def on_two_hosts(folder: Path) -> Path:
    result = folder / "two"
    for made in (result, *(folder / f"disk of host {number}" for number in (0, 1))):
        made.mkdir()
    logs = [folder / f"host{number}.log" for number in (0, 1)]
    with two_hosts() as names, ExitStack() as opened:
        hosts = []
        for number, name in enumerate(names):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", str(RANKS_PER_HOST), "--master-addr", ADDRESSES[0], "--master-port", "29431"),
                *(str(SCRIPT), str(folder / f"disk of host {number}"), str(result)),
            ]
            log = opened.enter_context(logs[number].open("w"))
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
            hosts.append(
                subprocess.Popen(["ip", "netns", "exec", name, *torchrun], stdout=log, stderr=log, env=environment)
            )
        try:
            codes = [host.wait(TIMEOUT_S) for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    return result


@pytest.mark.distributed
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
def test_two_hosts_with_a_disk_each_train_as_one_host_does(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    try:
        two = on_two_hosts(tmp_path)
    except NotAllowed as reason:
        pytest.skip(str(reason))
    ran = run_ranks(SCRIPT, 2 * RANKS_PER_HOST, tmp_path / "disk", one, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    # Every rank has a folder of its own, named by its global number, on its host's disk; local numbers start over on each.
    for rank in range(2 * RANKS_PER_HOST):
        host, local = divmod(rank, RANKS_PER_HOST)
        own = [f"rank{host * RANKS_PER_HOST + each}" for each in range(RANKS_PER_HOST)]
        assert (two / f"rank{rank}").read_text() == f"{local} {local} {own}"
    wanted, found = (load_file(folder / "masters.safetensors") for folder in (one, two))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    left = [path for host in (0, 1) for path in (tmp_path / f"disk of host {host}").iterdir()]
    assert left == [], "nothing is left on either disk"

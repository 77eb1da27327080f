"""Limits of memory as the kernel tells them: real and made-up trees of proc and sys."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.tiers.errors import BudgetError
from lamina.tiers.memory.limits import CgroupLimit, MemoryLimits, check_budget, read_memory_limits

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> str:
    """A made-up machine."""
    base = {
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n",
        "proc/self/status": "Name:\tx\nVmSize:\t  1048576 kB\nVmLck:\t     4 kB\nCapEff:\t0000000000000000\n",
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max locked memory         8388608              8388608              bytes     \n"
            "Max address space         unlimited            unlimited            bytes     \n"
        ),
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "",
    }
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


V2_MOUNT = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_this_machine() -> None:
    limits = read_memory_limits()
    assert 0 < limits.available <= limits.total
    allowed, why = limits.allowance()
    assert 0 < allowed <= limits.available
    assert why
    assert limits.as_dict()["total"] == limits.total


def test_without_groups_free_memory_counts(tmp_path: Path) -> None:
    limits = read_memory_limits(root=tree(tmp_path, {}))
    assert (limits.total, limits.available) == (16 * GIB, 8 * GIB)
    assert limits.cgroup is None
    assert limits.address_space_free is None
    assert limits.lockable == 8388608 - 4096
    assert limits.allowance() == (8 * GIB, "free memory (MemAvailable)")
    assert limits.allowance(locked=True) == (8388608 - 4096, "RLIMIT_MEMLOCK (ulimit -l)")


def test_v2_the_tightest_group_above_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            f"{group}/memory.max": "max\n",
            f"{group}/memory.high": f"{6 * GIB}\n",
            f"{group}/memory.current": f"{1 * GIB}\n",
            f"{group}/memory.stat": "anon 5\ninactive_file 0\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    limits = read_memory_limits(root=root)
    assert limits.cgroup is not None
    assert (limits.cgroup.limit, limits.cgroup.used, limits.cgroup.reclaimable) == (4 * GIB, 2 * GIB, GIB // 2)
    allowed, why = limits.allowance()
    assert allowed == 4 * GIB - 2 * GIB + GIB // 2
    assert f"cgroup limit {4 * GIB:,}" in why
    assert "user.slice" in why


@pytest.mark.parametrize("visible", ["whole tree", "own part only", "path not mounted"])
def test_v1_and_what_a_container_sees(tmp_path: Path, visible: str) -> None:
    mount = V1_MOUNT if visible == "whole tree" else V1_MOUNT.replace("0:32 / ", "0:32 /docker/abc ")
    path = {"whole tree": "docker/abc/", "own part only": "", "path not mounted": ""}[visible]
    own = "/elsewhere" if visible == "path not mounted" else "/docker/abc"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"9:name=systemd:/x\n4:memory,hugetlb:{own}\n0::/\n",
            "proc/self/mountinfo": mount,
            f"sys/fs/cgroup/memory/{path}memory.limit_in_bytes": f"{GIB}\n",
            f"sys/fs/cgroup/memory/{path}memory.usage_in_bytes": f"{GIB // 4}\n",
            f"sys/fs/cgroup/memory/{path}memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 8}\n",
        },
    )
    if visible == "whole tree":
        (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    limits = read_memory_limits(root=root)
    assert limits.cgroup is not None
    assert limits.cgroup.free == GIB - GIB // 4 + GIB // 8


def test_a_privileged_process_may_lock_at_will(tmp_path: Path) -> None:
    status = "VmSize:\t  1048576 kB\nVmLck:\t     0 kB\nCapEff:\t000001ffffffffff\n"
    assert read_memory_limits(root=tree(tmp_path, {"proc/self/status": status})).lockable is None


def test_a_budget_over_the_limit_is_refused_with_the_numbers() -> None:
    group = CgroupLimit(path="/sys/fs/cgroup/job", limit=512 << 20, used=100 << 20, reclaimable=20 << 20)
    limits = MemoryLimits(total=16 * GIB, available=8 * GIB, cgroup=group, address_space_free=None, lockable=64 << 20)
    free = (512 - 100 + 20) << 20
    check_budget("tiers.host_bytes", free, limits)
    check_budget("tiers.host_bytes", free + 5, limits, already_held=5)
    with pytest.raises(BudgetError) as caught:
        check_budget("tiers.host_bytes", GIB, limits)
    error = caught.value
    assert (error.wanted, error.free) == (GIB, free)
    for said in (
        "tiers.host_bytes is 1,073,741,824",
        f"{free:,}",
        f"cgroup limit {512 << 20:,}",
        f"{GIB - free:,} bytes are too many",
    ):
        assert said in str(error)
    with pytest.raises(BudgetError, match="RLIMIT_MEMLOCK"):
        check_budget("tiers.host_bytes", 100 << 20, limits, locked=True)


def test_rlimits_of_a_real_process() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from lamina.tiers.memory.limits import read_memory_limits\n"
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({4 * GIB}, {4 * GIB}))\n"
        "limits = read_memory_limits()\n"
        "print(limits.address_space_free, limits.allowance()[1])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    free = int(out.split()[0])
    assert 2 * GIB < free < 4 * GIB
    if read_memory_limits().available > 4 * GIB:
        assert "RLIMIT_AS" in out
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 4 * GIB

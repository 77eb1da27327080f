"""Machines by name. Device bytes are what the driver leaves to programs, rates are vendors' figures of one
direction."""

from dataclasses import replace

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.machine import Machine
from lamina.engine.planner.quantity import GB, GIB, MIB, TB

_GPU_RESERVE = 1024 * MIB  # context about 500 MiB, collectives' buffers and matrix library workspaces the rest
_PROCESS = 2 * GIB  # a process with a GPU context


def _dgx(
    name: str,
    *,
    devices: int,
    device_gib: float,
    host: int,
    half: float,
    fp32: float,
    hbm: float,
    link: float,
    peer: float,
    network: float,
    nvme: tuple[int, int, float, float],
    host_link: float | None = None,
    host_bandwidth: float,
) -> Machine:
    drives, space, read, write = nvme
    return Machine(
        name=name,
        devices_per_host=devices,
        device_bytes=int(device_gib * GIB),
        host_bytes=host,
        nvme_bytes=space,
        half_flops=half,
        fp32_flops=fp32,
        device_bandwidth=hbm,
        host_bandwidth=host_bandwidth,
        link_bandwidth=link,
        host_link_bandwidth=host_link,
        nvme_read_bandwidth=read,
        nvme_write_bandwidth=write,
        peer_bandwidth=peer,
        network_bandwidth=network,
        drives=drives,
        drive_tbw=7008,  # 3.84 TB, one full write a day for five years
        device_reserve_bytes=_GPU_RESERVE,
        process_bytes=_PROCESS,
        host_reserve_bytes=8 * GIB,
    )


_DGX2 = _dgx(
    "dgx2",
    devices=16,
    device_gib=31.74,
    host=1500 * GB,
    half=125e12,
    fp32=15.7e12,
    hbm=900 * GB,
    link=12 * GB,
    host_link=48 * GB,
    peer=150 * GB,
    network=100 * GB,
    nvme=(8, 28 * TB, 25.6 * GB, 25.6 * GB),
    host_bandwidth=200 * GB,
)

_H100 = _dgx(
    "h100",
    devices=8,
    device_gib=79.1,
    host=2000 * GB,
    half=989e12,
    fp32=67e12,
    hbm=3350 * GB,
    link=50 * GB,
    peer=450 * GB,
    network=400 * GB,
    nvme=(8, 30 * TB, 50 * GB, 30 * GB),
    host_bandwidth=500 * GB,
)

_A100 = _dgx(
    "a100-80",
    devices=8,
    device_gib=79.1,
    host=2000 * GB,
    half=312e12,
    fp32=19.5e12,
    hbm=2039 * GB,
    link=25 * GB,
    peer=300 * GB,
    network=200 * GB,
    nvme=(8, 30 * TB, 50 * GB, 28 * GB),
    host_bandwidth=380 * GB,
)

_MACHINES = (
    replace(_H100, name="h200", device_bytes=int(139.8 * GIB), device_bandwidth=4800 * GB),
    _H100,
    _A100,
    replace(
        _A100,
        name="a100-40",
        device_bytes=int(39.4 * GIB),
        host_bytes=1000 * GB,
        nvme_bytes=15 * TB,
        device_bandwidth=1555 * GB,
        nvme_read_bandwidth=25 * GB,
        nvme_write_bandwidth=14 * GB,
        drives=4,
    ),
    _DGX2,
    Machine(
        name="rtx4090",
        device_bytes=int(23.6 * GIB),
        host_bytes=128 * GB,
        nvme_bytes=2 * TB,
        half_flops=165e12,
        fp32_flops=82.6e12,
        device_bandwidth=1008 * GB,
        host_bandwidth=70 * GB,
        link_bandwidth=25 * GB,
        nvme_read_bandwidth=7 * GB,
        nvme_write_bandwidth=5 * GB,
        peer_bandwidth=12 * GB,
        network_bandwidth=1.2 * GB,
        drive_tbw=1200,
        device_reserve_bytes=768 * MIB,
        process_bytes=_PROCESS,
        host_reserve_bytes=4 * GIB,
    ),
    Machine(
        name="cpu-16",
        shared_memory=True,
        host_bytes=64 * GB,
        nvme_bytes=1 * TB,
        half_flops=1.5e12,
        fp32_flops=1.0e12,
        host_bandwidth=60 * GB,
        nvme_read_bandwidth=3.5 * GB,
        nvme_write_bandwidth=3 * GB,
        peer_bandwidth=5 * GB,
        network_bandwidth=1.2 * GB,
        drive_tbw=600,
        fragment_share=0.15,
        process_bytes=400 * MIB,
        host_reserve_bytes=2 * GIB,
    ),
)

MACHINE_PRESETS = {machine.name: machine for machine in _MACHINES}

_ALIASES = {
    "v100": "dgx2",
    "v100-32": "dgx2",
    "dgx-2": "dgx2",
    "a100": "a100-80",
    "4090": "rtx4090",
    "cpu": "cpu-16",
}


def machine_preset(name: str) -> Machine:
    """The preset called ``name``. Raises PlanError with the known names."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in MACHINE_PRESETS:
        raise PlanError(f"machine: {name!r} is no preset and no file; presets: this, {', '.join(MACHINE_PRESETS)}")
    return MACHINE_PRESETS[key]


def cluster_memory_tb(machine: Machine, devices: int, *, device_gb: int = 32) -> tuple[float, float, float]:
    """Memory of all tiers in TB for ``devices`` devices, printed as ZeRO-Infinity's figure 2(b) does.

    One host's devices are summed and cut to one decimal (16 x 32 GB = 0.5 TB), then hosts are multiplied.
    """
    per_host = machine.devices_per_host
    if devices < per_host:
        return devices * device_gb / 1000, machine.host_bytes / TB, machine.nvme_bytes / TB
    if devices % per_host:
        raise PlanError(f"devices: {devices} is not a multiple of the {per_host} devices of one {machine.name}")
    hosts = devices // per_host
    one_host = int(per_host * device_gb / 1000 * 10) / 10
    return hosts * one_host, hosts * machine.host_bytes / TB, hosts * machine.nvme_bytes / TB

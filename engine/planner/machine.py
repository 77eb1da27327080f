"""A machine as the planner sees it: bytes and rates of each tier and link."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.quantity import MIB, parse_number

_INT_FIELDS = frozenset(
    {"hosts", "devices_per_host", "device_bytes", "host_bytes", "nvme_bytes", "drives"}
    | {"device_reserve_bytes", "process_bytes", "host_reserve_bytes"}
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates are bytes per second; ``None`` means not known, and asking for it is an error that names the
    field."""

    name: str
    hosts: int = 1
    devices_per_host: int = 1
    shared_memory: bool = False
    """The device tier is host memory (no GPU): both tiers together must fit ``host_bytes``."""
    device_bytes: int = 0
    """Memory of one device, as its driver reports it; with shared memory the device budget of one rank, 0
    for none."""
    host_bytes: int = 0
    """Memory of one host (the container's limit where there is one)."""
    nvme_bytes: int = 0
    """Space for state on all drives of one host."""
    half_flops: float | None = None
    """Peak operations per second of one device in bf16 or fp16."""
    fp32_flops: float | None = None
    achievable: float = 0.5
    """Share of peak that dense training kernels reach when nothing waits."""
    device_bandwidth: float | None = None
    """Device memory."""
    host_bandwidth: float | None = None
    """Host memory of one host, all cores."""
    link_bandwidth: float | None = None
    """host→device and device→host of one device, each way."""
    host_link_bandwidth: float | None = None
    """host→device of all devices of one host together; None means devices times ``link_bandwidth``."""
    nvme_read_bandwidth: float | None = None
    nvme_write_bandwidth: float | None = None
    nvme_full_duplex: bool = False
    """Reads and writes at once reach both pure rates; otherwise they share the drive's time."""
    peer_bandwidth: float | None = None
    """Between devices of one host, per device."""
    network_bandwidth: float | None = None
    """Between hosts, per host."""
    drives: int = 1
    drive_tbw: float | None = None
    """Terabytes (10^12) written that one drive is rated for."""
    device_reserve_bytes: int = 0
    """Taken on each device before any state: context, communication and library workspaces."""
    process_bytes: int = 0
    """Host memory of one rank's process before any state: interpreter, torch, driver."""
    host_reserve_bytes: int = 0
    """Host memory left to everything else."""
    fragment_share: float = 0.0
    """What the framework's allocator holds beyond the activations in use, as a share of their peak."""
    overlap_loss: float = 0.1
    """Share of the hidden channels' time that shows in the step (imperfect overlap)."""

    notes: tuple[str, ...] = ()
    """Where figures come from, for people."""

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            if getattr(self, name) < 1:
                raise PlanError(f"machine {self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.host_bytes < 1:
            raise PlanError(f"machine {self.name}: host_bytes is missing; give the memory of one host")
        if not self.shared_memory and self.device_bytes < 1:
            raise PlanError(f"machine {self.name}: device_bytes is missing; give the memory of one device")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise PlanError(f"machine {self.name}: {item.name} is {value}; it must not be negative")
            if item.name.endswith(("bandwidth", "flops", "tbw")) and value == 0:
                raise PlanError(f"machine {self.name}: {item.name} is 0; give its rate, or leave it out if not known")
        if not 0 < self.achievable <= 1 or not 0 <= self.overlap_loss <= 1 or self.fragment_share > 1:
            raise PlanError(f"machine {self.name}: achievable must lie in (0, 1], overlap_loss in [0, 1]")

    @property
    def ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host

    def rate(self, name: str, why: str) -> float:
        """The rate called ``name``. Raises PlanError that says what it is needed for when it is not known."""
        value = getattr(self, name)
        if value is None:
            raise PlanError(f"machine {self.name}: {name} is missing and {why} needs it; give {name}=…GB/s")
        return float(value)

    def peak_flops(self, itemsize: int) -> float:
        """Peak of one device for a compute dtype of ``itemsize`` bytes."""
        name = "half_flops" if itemsize == 2 else "fp32_flops"
        if getattr(self, name) is None:
            raise PlanError(f"machine {self.name}: {name} is missing and the step time needs it; give {name}=…")
        return float(getattr(self, name))

    def device_rate_from(self, tier: str, *, active: int) -> float:
        """Bytes per second that each of ``active`` devices of one host gets when all read from ``tier`` at
        once."""
        if active < 1 or active > self.devices_per_host:
            raise PlanError(f"machine {self.name}: active devices {active} must lie in 1..{self.devices_per_host}")
        link = self.rate("link_bandwidth", "a transfer to the device")
        host = min(link, (self.host_link_bandwidth or link * self.devices_per_host) / active)
        if tier == "host":
            return host
        if tier == "nvme":
            return min(host, self.rate("nvme_read_bandwidth", "a read from nvme") / active)
        raise PlanError(f"tier: {tier!r} has no link to the device; write host or nvme")

    def with_changes(self, changes: Mapping[str, Any]) -> "Machine":
        """A machine with some fields changed, values written as people do. Raises PlanError naming unknown
        fields.

        Short names: ``host`` (bytes of one host), ``device`` (bytes), ``nvme`` (number of drives, space and
        rates scale; or space when a unit is given), ``devices``, ``hosts``.
        """
        known = {item.name: item for item in fields(self)}
        result: dict[str, Any] = {}
        for key, value in changes.items():
            short = {"host": "host_bytes", "device": "device_bytes", "devices": "devices_per_host"}
            name = short.get(key, key)
            if name == "nvme":
                result.update(self._nvme(value))
                continue
            if name not in known:
                raise PlanError(
                    f"machine: {key!r} is unknown; write one of host, device, nvme, devices, {', '.join(sorted(known))}"
                )
            result[name] = self._convert(name, value)
        return replace(self, **result)

    def _convert(self, name: str, value: Any) -> Any:
        if name == "name":
            return str(value)
        if name == "notes":
            return tuple(str(note) for note in value)
        if name in ("shared_memory", "nvme_full_duplex"):
            if str(value).lower() not in ("true", "false", "1", "0"):
                raise PlanError(f"machine: {name}: {value!r} must be true or false")
            return str(value).lower() in ("true", "1")
        number = parse_number(value, what=f"machine: {name}", per_second=True)
        return int(number) if name in _INT_FIELDS else number

    def _nvme(self, value: Any) -> dict[str, Any]:
        number = parse_number(value, what="machine: nvme")
        if number >= MIB or number == 0:
            return {"nvme_bytes": int(number)}
        drives = int(number)
        if drives < 1 or drives != number:
            raise PlanError(f"machine: nvme: {value!r} must be a whole number of drives, or bytes such as 4TB; 0: none")
        factor = drives / self.drives
        rates = {
            name: None if getattr(self, name) is None else getattr(self, name) * factor
            for name in ("nvme_read_bandwidth", "nvme_write_bandwidth")
        }
        return {"drives": drives, "nvme_bytes": int(self.nvme_bytes * factor), **rates}


def machine_from_mapping(values: Mapping[str, Any], *, source: str) -> Machine:
    """A machine from plain data (a JSON object). Raises PlanError that names unknown or missing fields."""
    known = {item.name for item in fields(Machine)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise PlanError(f"{source}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if "host_bytes" not in values:
        raise PlanError(f"{source}: host_bytes is missing; give the memory of one host")
    base = Machine(name=str(values.get("name", source)), host_bytes=1, device_bytes=1)
    given = {name: value for name, value in values.items() if value is not None}
    if "device_bytes" not in given:
        given["device_bytes"] = 0
        if str(given.get("shared_memory", False)).lower() not in ("true", "1"):
            raise PlanError(f"{source}: device_bytes is missing; give the memory of one device, or shared_memory: true")
    return base.with_changes(given)

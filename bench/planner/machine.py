"""The machine that `lamina plan` plans for: a preset, a JSON file, or this one with measured rates."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina.bench.nvme.gather import GatherError
from lamina.bench.planner.peers import MOST, peer_rate
from lamina.engine.planner import Machine, PlanError, machine_from_mapping, machine_preset, this_machine
from lamina.engine.planner.model_input import read_object
from lamina.engine.planner.quantity import format_bytes
from lamina.engine.planner.state_bytes import DType
from lamina.tiers.links.profile_file import load_profile

TORCH_NAMES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}


def find_machine(
    name: str,
    *,
    ranks: int = 1,
    dtype: DType = DType.BF16,
    nvme_path: str | None = None,
    profile: Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Machine:
    """The machine called `name`, with `changes` applied. Raises PlanError that names what is missing.

    For `this`, rates come from `profile`, those of compute and memory else from a measurement of under a
    second, and that between several ranks from exchanges of `dtype` through gloo, which take some seconds; a note of the
    machine says so.
    """
    if ranks < 1:
        raise PlanError(f"--ranks: {ranks} must be at least 1")
    if name == "this":
        # Only measuring needs torch, whose import takes longer than a plan.
        from lamina.bench.planner.rates import quick_rates

        rates = {**quick_rates(), **_profile_rates(nvme_path, profile, changes or {})}
        machine = this_machine(rates=rates, nvme_path=nvme_path, ranks=ranks)
        if ranks > 1 and "peer_bandwidth" not in (changes or {}):
            machine = _with_peer_rate(machine, ranks, dtype)
    elif Path(name).is_file():
        machine = machine_from_mapping(read_object(Path(name)), source=name)
    else:
        machine = machine_preset(name)
    return machine.with_changes(changes or {})


def _with_peer_rate(machine: Machine, ranks: int, dtype: DType) -> Machine:
    """The machine with the rate at which its ranks exchange bytes."""
    try:
        rate = peer_rate(ranks, TORCH_NAMES[dtype])
    except (GatherError, OSError) as error:
        raise PlanError(
            f"--ranks {ranks}: how fast ranks exchange bytes through gloo cannot be measured here ({error}); give it with --set "
            "peer_bandwidth=1e9 (bytes per second that a rank receives)"
        ) from error
    started = f", measured with {MOST} of them" if ranks > MOST else ""
    note = f"{ranks} ranks receive {format_bytes(rate)}/s each through gloo in gathers and sums of {dtype}{started}"
    return replace(machine, peer_bandwidth=rate, notes=(*machine.notes, note))


def _profile_rates(nvme_path: str | None, profile: Path | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Rates that `lamina nvme` measured on the disk of `nvme_path`; none without a path.

    Raises ProfileError when there is no profile, or one of another disk, unless `changes` gives the rates.
    """
    if nvme_path is None:
        if profile is not None:
            raise PlanError(f"--profile {profile}: give --nvme-path too, the folder whose disk it describes")
        return {}
    if profile is None and {"nvme_read_bandwidth", "nvme_write_bandwidth"} <= set(changes):
        return {}
    return dict(load_profile([nvme_path], file=profile).planner_rates())

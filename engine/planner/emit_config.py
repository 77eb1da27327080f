"""A config that ``initialize`` accepts, for one option: DeepSpeed's dialect and the block ``tiers``."""

from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.items import Kind
from lamina.engine.planner.options import Option
from lamina.engine.planner.placement import DEVICE, HOST, NVME
from lamina.engine.planner.quantity import MIB
from lamina.engine.planner.state_bytes import PAGE_BYTES, DType, Optimizer

_OFFLOAD = {DEVICE: "none", HOST: "cpu", NVME: "nvme"}
_OPTIMIZERS = {
    Optimizer.ADAM: "Adam",
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAGRAD: "Adagrad",
    Optimizer.MOMENTUM: "SGD",
    Optimizer.SGD: "SGD",
}


def emit_config(item: Option, *, nvme_path: str = "lamina-nvme", lr: float = 1e-4) -> dict[str, Any]:
    """Plain data to be written as JSON. Budgets are the option's own needs, blocks aligned to pages.

    ``nvme_path`` is named once for all nvme state; ``lr`` is a placeholder that users will change. Raises
    PlanError for what this engine does not run.
    """
    if item.obstacles:
        raise PlanError(f"{item.label}: this engine does not run it: {'; '.join(item.obstacles)}")
    case = item.case
    load, part = case.load, case.slice
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": load.micro_batch,
        "gradient_accumulation_steps": load.accumulation,
        "train_batch_size": load.micro_batch * load.accumulation * part.ranks,
        "gradient_clipping": 1.0 if load.barrier else 0.0,
    }
    if load.optimizer in _OPTIMIZERS:
        params: dict[str, Any] = {"lr": lr}
        if load.optimizer is Optimizer.MOMENTUM:
            params["momentum"] = 0.9
        config["optimizer"] = {"type": _OPTIMIZERS[load.optimizer], "params": params}
    else:  # a class of the user's own, given to initialize(optimizer=...)
        config["zero_allow_untested_optimizer"] = True
    if load.dtype is not DType.FP32:
        config[load.dtype.value] = {"enabled": True}
    config["zero_optimization"] = _zero(item)
    config["tiers"] = _tiers(item, nvme_path)
    return config


def _zero(item: Option) -> dict[str, Any]:
    place, own = item.case.place, item.case.buffers
    zero: dict[str, Any] = {"stage": place.stage, "sub_group_size": own.sub_group}
    if place.param != DEVICE:
        zero["offload_param"] = {"device": _OFFLOAD[place.param]}
    if place.optimizer != DEVICE:
        zero["offload_optimizer"] = {"device": _OFFLOAD[place.optimizer]}
    if own.max_live is not None and place.stage == 3:
        zero["stage3_max_live_parameters"] = own.max_live
    if own.reduce_bucket is not None:
        zero["reduce_bucket_size"] = own.reduce_bucket
    return zero


def _tiers(item: Option, nvme_path: str) -> dict[str, Any]:
    case = item.case
    place = case.place
    planes = {plane: place.optimizer for plane in case.planes if plane not in ("param", *case.own_planes)}
    if place.stage:  # at stage 0 nothing can be moved; gradients are in the host tier all the same
        planes["grad"] = place.grad
    tiers: dict[str, Any] = {
        "placement": {"param": place.param, **planes},
        "generations": case.buffers.generations,
        "lookahead": case.buffers.lookahead,
    }
    # With a longer interval it is the model that says which blocks are computed again.
    if case.load.checkpoint_interval == 1:
        tiers["activations"] = place.activations
    if case.wishes.saved_input_bytes:
        tiers["activation_bytes"] = case.wishes.saved_input_bytes
    for tier, key in ((DEVICE, "device_bytes"), (HOST, "host_bytes")):
        need = budget_bytes(item, tier)
        if need:
            tiers[key] = need
    if item.held.peak(NVME):
        tiers["nvme"] = [{"path": nvme_path, "bytes": item.held.host_peak(NVME) + MIB * case.machine.devices_per_host}]
    return tiers


def budget_bytes(item: Option, tier: str) -> int:
    """The byte budget of one rank on ``tier``: what its arena will hold at most, every block rounded up to
    a page."""
    need = item.held.arena_peak(tier)
    if not need:
        return 0
    part = item.case.slice
    # One block for each plane of each group, gradients included, and the runs of the window.
    blocks = len(part.groups) * (len(item.case.planes) + 2)
    return -(-(need + blocks * PAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES


def outside_budget(item: Option, tier: str) -> dict[Kind, int]:
    """Bytes by kind that the budget does not cover, at the peak phase of ``tier``."""
    phase = item.held.peak_phase(tier)
    result: dict[Kind, int] = {}
    for entry in item.held.items:
        if entry.tier == tier and not entry.arena and phase in entry.phases:
            result[entry.kind] = result.get(entry.kind, 0) + entry.nbytes
    return result

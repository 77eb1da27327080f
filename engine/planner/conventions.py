"""Other people's formulas, each under its own name, so that their printed figures can be shown beside ours.

``zero_paper``  ZeRO (2020), table 1: 2 + 2 + 12 bytes per parameter, decimal GB.
``infinity``    ZeRO-Infinity (2021), section 3: 20 bytes per parameter, binary units, working memories.
``deepspeed``   the memory estimator of DeepSpeed's documentation: 18 bytes, a factor 1.5 on the host, GiB.
None of these knows activations, buffers or the NVMe tier's generations: that is what our own figure adds.
"""

from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.quantity import GB, GIB, TIB
from lamina.engine.planner.state_bytes import staged_bytes_per_param

INFINITY_STATE_BYTES = 20
"""Bytes per parameter in ZeRO-Infinity: fp16 parameter 2 and gradient 2, fp32 gradient, master and two
moments."""

FLOPS_PER_PARAM_TOKEN = 8
"""Forward 2, backward 4 and one recomputed forward 2: the count behind the paper's arithmetic intensities."""


def printed(value: float, digits: int, *, truncate: bool = False) -> Decimal:
    """``value`` with ``digits`` decimals as a table prints it: half up, or cut off."""
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_DOWN if truncate else ROUND_HALF_UP)


def printed_significant(value: float, digits: int) -> Decimal:
    """``value`` rounded half up to ``digits`` significant digits."""
    exact = Decimal(repr(value))
    return exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), ROUND_HALF_UP)


def zero_paper_gb(params: float, stage: int, ranks: int) -> float:
    """Model states of one device in decimal GB: 2 bytes parameter, 2 gradient, 12 optimizer."""
    return params * staged_bytes_per_param(stage, ranks, param=2, grad=2, optimizer=12) / GB


@dataclass(frozen=True, kw_only=True)
class InfinityMemory:
    """One row of ZeRO-Infinity's memory table."""

    params: int
    states_tib: float
    activations_tib: float
    """All activations of one node."""
    checkpoints_tib: float
    """Activation checkpoints of one node."""
    mswm_gib: float
    """Model state working memory: parameters and gradients of the largest operator."""
    awm_gib: float
    """Activation working memory of one GPU: what is recomputed between two checkpoints."""


def infinity_working_bytes(*, batch: int, sequence: int, interval: int, hidden: int, heads: int) -> int:
    """Activation working memory: 2 * b * s * ci * (16 * hidden + 2 * heads * s) bytes."""
    return 2 * batch * sequence * interval * (16 * hidden + 2 * heads * sequence)


def infinity_checkpoint_bytes(*, batch: int, sequence: int, interval: int, hidden: int, layers: int) -> float:
    """Activation checkpoints: 2 * b * s * hidden * layers / ci bytes."""
    return 2 * batch * sequence * hidden * layers / interval


def infinity_memory(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int = 1024,
    node_batch: int = 32,
    gpu_batch: int = 2,
    interval: int = 1,
) -> InfinityMemory:
    """The paper's memory requirements of one GPT-like model; params = 12 * layers * hidden^2."""
    params = 12 * layers * hidden**2
    shape = {"sequence": sequence, "interval": interval, "hidden": hidden}
    awm = infinity_working_bytes(batch=gpu_batch, heads=heads, **shape)
    return InfinityMemory(
        params=params,
        states_tib=INFINITY_STATE_BYTES * params / TIB,
        activations_tib=infinity_working_bytes(batch=node_batch, heads=heads, **shape) * layers / interval / TIB,
        checkpoints_tib=infinity_checkpoint_bytes(batch=node_batch, layers=layers, **shape) / TIB,
        mswm_gib=16 * hidden**2 / GIB,
        awm_gib=awm / GIB,
    )


_CHANNEL_BYTES = {"parameters": 8, "optimizer": 32}


def infinity_intensity(
    channel: str, *, batch: float = 1, sequence: int = 1024, hidden: int = 0, interval: int = 1
) -> float:
    """Flops per byte of one channel: 8 * tokens / bytes per parameter and step; checkpoints: 24 * hidden *
    ci."""
    if channel == "activation_checkpoints":
        if hidden < 1:
            raise PlanError(f"hidden: {hidden} must be at least 1 for the channel {channel}")
        return 24.0 * hidden * interval
    if channel not in _CHANNEL_BYTES:
        known = ", ".join((*_CHANNEL_BYTES, "activation_checkpoints"))
        raise PlanError(f"channel: {channel!r} is unknown; write one of {known}")
    return FLOPS_PER_PARAM_TOKEN * batch * sequence / _CHANNEL_BYTES[channel]


def efficiency(intensity: float, bandwidth: float, peak_flops: float) -> float:
    """ZeRO-Infinity equation 6: the share of peak that is reached when nothing overlaps."""
    if intensity <= 0 or bandwidth <= 0 or peak_flops <= 0:
        raise PlanError(
            f"efficiency wants intensity, bandwidth, peak above 0, got {intensity}, {bandwidth}, {peak_flops}"
        )
    return intensity * bandwidth / (intensity * bandwidth + peak_flops)


def bandwidth_for(intensity: float, wanted: float, peak_flops: float) -> float:
    """Bytes per second at which a channel of this intensity allows the efficiency ``wanted`` (0 < wanted <
    1)."""
    if not 0 < wanted < 1:
        raise PlanError(f"efficiency: {wanted} must lie between 0 and 1")
    return wanted / (1 - wanted) * peak_flops / intensity


@dataclass(frozen=True, kw_only=True)
class DeepSpeedEstimate:
    """What DeepSpeed's estimator prints for one setting."""

    host_bytes: float
    device_bytes: float


def deepspeed_zero3(
    *,
    params: int,
    largest_layer: int,
    devices_per_host: int,
    hosts: int = 1,
    offload_param: bool,
    offload_optimizer: bool,
    zero_init: bool,
    host_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """ZeRO-3: a device holds the largest layer (4 bytes) and its part of what is not offloaded (18 or 2
    bytes)."""
    if offload_param and not offload_optimizer:
        raise PlanError("the estimator has no formula for offload_param without offload_optimizer")
    ranks = devices_per_host * hosts
    whole_copies = 4 * devices_per_host  # without zero.Init every process builds the model in fp32
    window = 4 * largest_layer
    if not offload_optimizer:
        built = (largest_layer if zero_init else params) * whole_copies
        return DeepSpeedEstimate(host_bytes=built * host_factor, device_bytes=window + 18 * params // ranks)
    per_param = (18 if offload_param else 16) / hosts
    host = params * (per_param if zero_init else max(whole_copies, per_param))
    device = window + (0 if offload_param else 2 * params // ranks)
    return DeepSpeedEstimate(host_bytes=host * host_factor, device_bytes=device)


def deepspeed_zero2(
    *, params: int, devices_per_host: int, hosts: int = 1, offload_optimizer: bool, host_factor: float = 1.5
) -> DeepSpeedEstimate:
    """ZeRO-2: 2 bytes per parameter on the device with offload, else 4 and a part of 16."""
    whole_copies = 4 * devices_per_host
    if offload_optimizer:
        return DeepSpeedEstimate(host_bytes=params * max(whole_copies, 16) * host_factor, device_bytes=2 * params)
    device = 4 * params + 16 * params // (devices_per_host * hosts)
    return DeepSpeedEstimate(host_bytes=params * whole_copies * host_factor, device_bytes=device)

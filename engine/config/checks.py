"""What no single key decides: the batch arithmetic and combinations that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.engine.config.batch import BatchContradiction, resolve_batch
from lamina.engine.config.optimizer import AdamConfig, TorchOptimizerConfig
from lamina.engine.config.scheduler import (
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from lamina.engine.config.tiers import STATE_PLANES, PlaneChoice, tier_shares

if TYPE_CHECKING:
    from lamina.engine.config.engine_config import EngineConfig
    from lamina.engine.config.reader import Reading

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization"


@dataclass(frozen=True)
class Finding:
    """A combination to report under `path`; one that only `warns` is a hint.

    It follows from `path` and `also`: if one of those is faulty itself, nothing follows.
    """

    path: str
    message: str
    also: tuple[str, ...] = ()
    warns: bool = False


Check = Callable[["EngineConfig"], Iterator[Finding]]


def check_all(reading: Reading[Any], config: EngineConfig, world_size: int) -> EngineConfig:
    """Note every impossible combination in `reading`; the config comes back with its batch sizes derived."""
    findings = [finding for check in CHECKS for finding in check(config)]
    for finding in findings:
        if not reading.is_sound(finding.path, *finding.also):
            continue
        if finding.warns:
            reading.hints.append(f"{finding.path}: {finding.message}")
        else:
            reading.problems.append((finding.path, finding.message))
    return _batch(reading, config, world_size)


def _batch(reading: Reading[Any], config: EngineConfig, world_size: int) -> EngineConfig:
    if not reading.is_sound(*_BATCH_KEYS):
        return config
    given = {key: getattr(config, key) if key in config.model_fields_set else None for key in _BATCH_KEYS}
    train, micro, accumulation = (given[key] for key in _BATCH_KEYS)
    try:
        sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size)
    except BatchContradiction as error:
        named = next((key for key in _BATCH_KEYS if given[key] is not None), _BATCH_KEYS[0])
        reading.fault(named, str(error))
        return config
    for key in _BATCH_KEYS:
        if given[key] is None:
            reading.origins[key] = "auto, derived" if key in reading.origins else "derived"
    update = dict(zip(_BATCH_KEYS, (sizes.train, sizes.micro, sizes.accumulation), strict=True))
    return config.model_copy(update=update)


def _precision(config: EngineConfig) -> Iterator[Finding]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield Finding("bf16.enabled", "fp16.enabled is true as well: set one of them to false", ("fp16.enabled",))
    first = 2.0**fp16.initial_scale_power
    if fp16.enabled and fp16.loss_scale == 0 and fp16.min_loss_scale > first:
        yield Finding(
            "fp16.min_loss_scale",
            f"{fp16.min_loss_scale:g} is above the first scale 2^{fp16.initial_scale_power} = {first:g}: "
            "lower it, or raise fp16.initial_scale_power",
            ("fp16.initial_scale_power", "fp16.loss_scale"),
        )
    wanted = config.data_types.grad_accum_dtype
    if wanted not in (None, "fp32", config.compute_dtype):
        yield Finding(
            "data_types.grad_accum_dtype",
            f'is "{wanted}", but gradients are computed in {config.compute_dtype}: '
            f'write "fp32" or "{config.compute_dtype}"',
            ("fp16.enabled", "bf16.enabled"),
        )


def _communication(config: EngineConfig) -> Iterator[Finding]:
    wanted = config.communication_data_type
    if wanted not in (None, config.compute_dtype):
        yield Finding(
            "communication_data_type",
            f'is "{wanted}", but gradients are reduced as they are computed, in {config.compute_dtype}: '
            f'write "{config.compute_dtype}", or leave it out',
            ("fp16.enabled", "bf16.enabled"),
        )


def _prefetch(config: EngineConfig) -> Iterator[Finding]:
    wanted, where = config.zero_optimization.stage3_prefetch_bucket_size, f"{_ZERO}.stage3_prefetch_bucket_size"
    if "stage3_prefetch_bucket_size" not in config.zero_optimization.model_fields_set:
        return
    if wanted:
        message = "how far is fetched ahead follows from tiers.lookahead and the budgets; 0 switches it off"
        yield Finding(where, message, warns=True)
    elif config.tiers.lookahead not in ("auto", 0):
        yield Finding(
            where,
            f"is 0 (nothing is fetched ahead), but tiers.lookahead is {config.tiers.lookahead}: keep one of them",
            ("tiers.lookahead",),
        )


def _shares(config: EngineConfig) -> Iterator[Finding]:
    """The planes of the optimizer lie side by side: on one tier, or with the same shares of tiers."""
    if not isinstance(config.tiers.placement, dict):
        return
    if isinstance(config.tiers.placement.get("grad"), dict):
        yield Finding(
            "tiers.placement",
            "gives grad shares of tiers: gradients are in host memory and go further only when its budget cannot hold them; "
            'write "host" or leave grad out',
        )
    asked = config.placement()
    choices = [asked[plane] for plane in STATE_PLANES if plane not in config.absent_planes]
    told = sorted({_told(choice) for choice in choices if choice != "auto"})
    if len(told) > 1:
        yield Finding(
            "tiers.placement",
            f"puts the optimizer's planes on {' and on '.join(told)}: master, remainder, exp_avg and exp_avg_sq share one "
            f"tier, or the same shares of tiers",
        )


def _told(choice: PlaneChoice) -> str:
    """A tier, or shares of several with the fastest first."""
    shares = tier_shares(choice)
    return ", ".join(f"{share:g} {tier}" for tier, share in shares.items()) if len(shares) > 1 else next(iter(shares))


def _offload(config: EngineConfig) -> Iterator[Finding]:
    zero = config.zero_optimization
    stage = f"{_ZERO}.stage"
    param, optimizer = zero.offload_param, zero.offload_optimizer
    if param.device != "none" and zero.stage != 3:
        yield Finding(
            f"{_ZERO}.offload_param.device",
            f'"{param.device}" needs {stage} 3, which is {zero.stage}: write 3, or device "none"',
            (stage,),
        )
    if optimizer.device != "none" and zero.stage == 0:
        yield Finding(
            f"{_ZERO}.offload_optimizer.device",
            f'"{optimizer.device}" needs {stage} 1, 2 or 3, which is 0: write one of them, or device "none"',
            (stage,),
        )
    folders = {entry.path for entry in config.tiers.nvme}
    for name, block in (("offload_param", param), ("offload_optimizer", optimizer)):
        where = f"{_ZERO}.{name}"
        if block.device != "nvme":
            if block.nvme_path is not None:
                yield Finding(f"{where}.nvme_path", f'has no effect while device is "{block.device}"', warns=True)
        elif block.nvme_path is None and not folders:
            yield Finding(
                f"{where}.device",
                f'is "nvme", and no folder is named: give {where}.nvme_path or tiers.nvme',
                (f"{where}.nvme_path", "tiers.nvme"),
            )
        elif block.nvme_path is not None and folders and block.nvme_path not in folders:
            yield Finding(
                f"{where}.nvme_path",
                f"{block.nvme_path} is not among the folders of tiers.nvme ({', '.join(sorted(folders))}): "
                "name the same, or leave one of the two keys out",
                ("tiers.nvme",),
            )


def _placement(config: EngineConfig) -> Iterator[Finding]:
    stage = config.zero_optimization.stage
    paths = [entry.path for entry in config.tiers.nvme]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield Finding("tiers.nvme", f"names the folder {path} twice: keep one")
    if "tiers" in config.model_fields_set and "stage" in config.zero_optimization.model_fields_set and stage == 0:
        message = f"budgets are held, but nothing leaves device memory at {_ZERO}.stage 0"
        yield Finding("tiers", message, (f"{_ZERO}.stage",), warns=True)
    if not isinstance(config.tiers.placement, dict):
        return
    for plane, choice in config.tiers.placement.items():
        tiers = {tier for tier, share in choice.items() if share} if isinstance(choice, dict) else {choice}
        least = 3 if plane == "param" else 1
        if tiers - {"device"} and stage < least:
            yield Finding(
                "tiers.placement",
                f"puts {plane} on {', '.join(sorted(tiers - {'device'}))}, which needs {_ZERO}.stage "
                f"{'3' if least == 3 else '1, 2 or 3'}; it is {stage}",
                (f"{_ZERO}.stage",),
            )
        if "nvme" in tiers and not config.nvme_paths:
            yield Finding(
                "tiers.placement",
                f"puts {plane} on nvme, and no folder is named: give tiers.nvme",
                ("tiers.nvme", _ZERO),
            )
        block = "offload_param" if plane == "param" else "offload_optimizer"
        device = getattr(config.zero_optimization, block).device
        if device != "none" and {"cpu": "host", "nvme": "nvme"}[device] not in tiers and plane != "grad":
            message = f'decides where {plane} lies, not {_ZERO}.{block}.device "{device}"'
            yield Finding("tiers.placement", message, (f"{_ZERO}.{block}",), warns=True)
        if plane in config.absent_planes:
            message = f"names {plane}, a plane that training in {config.compute_dtype} does not have"
            yield Finding("tiers.placement", message, ("fp16", "bf16"), warns=True)


def _activations(config: EngineConfig) -> Iterator[Finding]:
    tiers, where = config.tiers, "tiers.activations"
    if config.activations == "nvme" and not config.nvme_paths:
        yield Finding(where, 'is "nvme", and no folder is named: give tiers.nvme', ("tiers.nvme", _ZERO))
    if tiers.activations in ("keep", "device", "nvme") and config.activation_checkpointing.cpu_checkpointing:
        yield Finding(
            where,
            f'is "{tiers.activations}", but activation_checkpointing.cpu_checkpointing puts inputs in host memory: keep one',
            ("activation_checkpointing.cpu_checkpointing",),
        )
    if tiers.activation_bytes is not None and config.activations not in ("host", "nvme"):
        message = f'has no effect while tiers.activations is "{config.activations}"'
        yield Finding("tiers.activation_bytes", message, (where, "activation_checkpointing"), warns=True)


def _aio(config: EngineConfig) -> Iterator[Finding]:
    if config.aio.use_gds:
        yield Finding("aio.use_gds", "GPUDirect storage is not offered: write false")


def _optimizer(config: EngineConfig) -> Iterator[Finding]:
    block = config.optimizer
    if isinstance(block, AdamConfig):
        for beta in block.params.betas:
            if not 0 <= beta < 1:
                yield Finding("optimizer.params.betas", f"want each at least 0 and less than 1, got {beta:g}")
        if block.type == "AdamW" and not block.params.adam_w_mode:
            yield Finding(
                "optimizer.params.adam_w_mode",
                'is false, but the type is AdamW: write type "Adam", or leave it out',
            )
    elif isinstance(block, TorchOptimizerConfig):
        on_nvme = config.zero_optimization.offload_optimizer.device == "nvme"
        if on_nvme:
            yield Finding(
                f"{_ZERO}.offload_optimizer.device",
                f'"nvme" is for Adam and AdamW; the state of {block.type} stays on device or host: '
                'write "cpu" or "none"',
                ("optimizer.type",),
            )


def _scheduler(config: EngineConfig) -> Iterator[Finding]:
    if config.scheduler is None:
        return
    params, where = config.scheduler.params, "scheduler.params"
    falling = params if isinstance(params, WarmupDecayLRParams | WarmupCosineLRParams) else None
    if falling is not None and falling.total_num_steps < falling.warmup_num_steps:
        yield Finding(
            f"{where}.total_num_steps",
            f"{falling.total_num_steps} is less than warmup_num_steps {falling.warmup_num_steps}: "
            "the warm-up would not end; raise the one or lower the other",
            (f"{where}.warmup_num_steps",),
        )
    if isinstance(params, WarmupLRParams):
        yield from _ordered(where, "warmup_min_lr", params.warmup_min_lr, "warmup_max_lr", params.warmup_max_lr)
        peak = params.warmup_max_lr
        own = config.optimizer.params.lr if isinstance(config.optimizer, AdamConfig) else None
        if isinstance(peak, float) and own is not None and peak != own:
            message = f"the schedule's peak {peak:g} is used, not optimizer.params.lr {own:g}"
            yield Finding(f"{where}.warmup_max_lr", message, ("optimizer",), warns=True)
    if isinstance(params, OneCycleParams):
        yield from _ordered(where, "cycle_min_lr", params.cycle_min_lr, "cycle_max_lr", params.cycle_max_lr)
        yield from _ordered(where, "cycle_min_mom", params.cycle_min_mom, "cycle_max_mom", params.cycle_max_mom)


def _ordered(where: str, low: str, least: object, high: str, most: object) -> Iterator[Finding]:
    if isinstance(least, float | int) and isinstance(most, float | int) and least > most:
        yield Finding(f"{where}.{low}", f"{least:g} is above {high} {most:g}: swap them", (f"{where}.{high}",))


def _without_effect(config: EngineConfig) -> Iterator[Finding]:
    zero = config.zero_optimization
    for key in sorted(zero.model_fields_set) if zero.stage < 3 else ():
        if key.startswith("stage3_") and getattr(zero, key) != type(zero).model_fields[key].default:
            message = f"has no effect below {_ZERO}.stage 3, which is {zero.stage}"
            yield Finding(f"{_ZERO}.{key}", message, (f"{_ZERO}.stage",), warns=True)


CHECKS: tuple[Check, ...] = (
    _precision,
    _communication,
    _prefetch,
    _shares,
    _offload,
    _placement,
    _activations,
    _aio,
    _optimizer,
    _scheduler,
    _without_effect,
)
